"""Attention block by block: the matrix of weights [T, S] is never stored."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.kernel import FLASH_RESIDUALS
from jaxformer.ops.dense import summed_in_float32
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import MASKED_LOGIT, AttentionMask


def blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
    block: int = 256,
) -> Float[Array, "B T N Hv"]:
    """Attention over blocks of `block` queries and `block` keys.

    The plain twin is `reference`: both give the same result, dropout mask included, to rounding.

    The forward pass updates a softmax with each block of keys (Milakov & Gimelshein 2018; Rabe &
    Staats 2021). The backward pass computes each block again from the logarithm of the row's sum
    (Dao et al. 2022, algorithms 1 and 4). Both need memory that grows with T + S; a `bias` keeps
    its own size. With `causal` and an `offset` that is a number, blocks in which no query sees a
    key are skipped. Sums are in float32. On two CPU cores blocks of 256 are faster than blocks of
    128 and 512. Raises `ConfigError` for a block below 1.

    >>> q = k = jnp.zeros((1, 3, 1, 4))
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> out = blockwise(q, k, v, AttentionMask(causal=True), scale=0.5)
    >>> out[0, :, 0, 0].round(4)  # the mean of v up to each token
    Array([1. , 1.5, 3. ], dtype=float32)
    """
    if block < 1:
        raise ConfigError(f"block={block} is a number of queries and keys: give at least 1")
    batch, queries, heads, _ = q.shape
    keys, groups = k.shape[1:3]
    t, s = min(block, queries), min(block, keys)
    more_queries, more_keys = -queries % t, -keys % s  # to whole blocks; added keys are masked
    valid = mask.padding_mask
    if more_keys and valid is None:
        valid = jnp.ones((batch, keys), bool)
    explicit = _pad(mask.explicit, 2, more_keys)
    if explicit is not None and explicit.shape[1] > 1:  # otherwise one row is for all queries
        explicit = _pad(explicit, 1, more_queries)
    mask = replace(
        mask,
        padding_mask=_pad(valid, 1, more_keys),
        query_segments=_pad(mask.query_segments, 1, more_queries),
        key_segments=_pad(mask.key_segments, 1, more_keys),
        explicit=explicit,
    )
    q = _pad(q, 1, more_queries).reshape(batch, -1, t, groups, heads // groups, q.shape[3])
    k, v = (_pad(x, 1, more_keys).reshape(batch, -1, s, *x.shape[2:]) for x in (k, v))
    inputs = _Inputs(
        q.transpose(1, 0, 3, 4, 2, 5),
        k.transpose(1, 0, 3, 4, 2),
        v.transpose(1, 0, 3, 4, 2),
        _pad(_pad(bias, 2, more_queries), 3, more_keys),
        mask,
        None if dropout is None else dropout.dropout_rng,
    )
    settings = (dropout.name, dropout.rate) if dropout is not None else ("", 0.0)
    out: Array = _attend(_Tiling((t, s), scale, softcap, *settings), inputs)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, v.shape[-1])[:, :queries]


@dataclass(frozen=True)
class _Tiling:
    """Static arguments."""

    size: tuple[int, int]  # of a block: t queries, s keys
    scale: float
    softcap: float | None
    dropout_name: str
    rate: float


class _Inputs(NamedTuple):
    """Traced arguments, cut into blocks along axis 0, where dynamic slices are cheap.

    With the positions of keys and values last, no product of a block of weights transposes it: on a
    CPU, XLA would take as long for that as for the product.
    """

    q: Array  # [blocks, B, K, N/K, t, H]
    k: Array  # [blocks, B, K, H, s]
    v: Array  # [blocks, B, K, Hv, s]
    bias: Array | None  # [1 or B, N, T, S], in whole blocks, as the mask
    mask: AttentionMask
    dropout_rng: DropoutRng | None

    def visible(self, plan: _Tiling) -> np.ndarray:
        """The pairs (query block, key block) [P, 2] int32 in which a query may see a key."""
        pairs = np.indices((len(self.q), len(self.k)), dtype=np.int32).reshape(2, -1)
        if not self.mask.causal or not isinstance(self.mask.offset, int):
            return pairs.T
        first_query, first_key = pairs * np.array(plan.size)[:, None] + [[self.mask.offset], [0]]
        seen = first_key <= first_query + plan.size[0] - 1
        if self.mask.window is not None:
            seen &= first_key + plan.size[1] - 1 > first_query - self.mask.window
        return pairs.T[seen]


def _pad(x: Any, axis: int, count: int) -> Any:
    """`x` with `count` zeros at the end of `axis`; None stays None."""
    if x is None or count == 0:
        return x
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])


def _at(x: Array, i: Array) -> Array:
    """Block `i` of `x`."""
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: Array, part: Array, i: Array) -> Array:
    """`x` with `part` as its block `i`."""
    return jax.lax.dynamic_update_index_in_dim(x, part, i, 0)


def _add(x: Array, part: Array, i: Array) -> Array:
    """`x` with `part` added to its block `i`."""
    return _put(x, _at(x, i) + part, i)


def _product(equation: str, *operands: Array) -> Array:
    """`jnp.einsum` with sums in float32."""
    return summed_in_float32(partial(jnp.einsum, equation), *operands)


def _logits(plan: _Tiling, x: _Inputs, i: Array, j: Array):
    """Logits [B, K, N/K, t, s] float32 of one pair of blocks, and their slopes.

    The slope is the derivative of a logit by the product of query and key.
    """
    q, (t, s) = _at(x.q, i), plan.size
    logits = _product("BKGTH,BKHS->BKGTS", q, _at(x.k, j)) * plan.scale
    slope: Array | float = plan.scale
    if plan.softcap is not None:
        tanh = jnp.tanh(logits / plan.softcap)
        logits, slope = plan.softcap * tanh, plan.scale * (1 - tanh * tanh)
    if x.bias is not None:
        part = jax.lax.dynamic_slice(x.bias, (0, 0, i * t, j * s), (*x.bias.shape[:2], t, s))
        logits = logits + part.reshape(part.shape[0], *q.shape[1:3], t, s)
    allowed = x.mask.slice(i * t, t, j * s, s).materialize(t, s)
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None], logits, MASKED_LOGIT)
    return logits, slope


def _dropped(plan: _Tiling, dropout_rng: DropoutRng | None, x: Array, i: Array, j: Array) -> Array:
    """`x` [B, K, N/K, t, s] of one pair of blocks after dropout."""
    if dropout_rng is None:
        return x
    (batch, groups, share), (t, s) = x.shape[:3], plan.size
    shape, start = (batch, groups * share, t, s), (0, i * t, j * s)
    keep = dropout_rng.keep_mask(plan.dropout_name, shape, plan.rate, start=start)
    return x * jnp.where(keep, 1.0 / (1.0 - plan.rate), 0.0).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Tiling, inputs: _Inputs) -> Array:
    return _forward(plan, inputs)[0]


def _forward(plan: _Tiling, x: _Inputs):
    """Attention, and what the backward pass needs: inputs, result, logarithm of each row's sum."""
    # Above the masked logits, so that their weights are 0 also where a query sees no key.
    highest = jnp.full(x.q.shape[:-1], MASKED_LOGIT / 2, jnp.float32)

    def visit(carry, pair):
        highest, total, out = carry
        i, j = pair
        logits, _ = _logits(plan, x, i, j)
        before = _at(highest, i)
        now = jnp.maximum(before, logits.max(-1))
        weights = jnp.exp(logits - now[..., None])
        shrink = jnp.exp(before - now)
        sums = _at(total, i) * shrink + weights.sum(-1)
        weights = _dropped(plan, x.dropout_rng, weights, i, j).astype(x.v.dtype)
        gathered = _product("BKGTS,BKHS->BKGTH", weights, _at(x.v, j))
        gathered = _at(out, i) * shrink[..., None] + gathered
        return (_put(highest, now, i), _put(total, sums, i), _put(out, gathered, i)), None

    out = jnp.zeros((*highest.shape, x.v.shape[-2]), jnp.float32)
    carry = highest, jnp.zeros_like(highest), out
    (highest, total, out), _ = jax.lax.scan(visit, carry, x.visible(plan))
    has_key = total > 0
    total = jnp.where(has_key, total, 1.0)
    out = jnp.where(has_key[..., None], out / total[..., None], 0.0).astype(x.v.dtype)
    out, log_sum = checkpoint_name((out, highest + jnp.log(total)), FLASH_RESIDUALS)
    return out, (x, out, log_sum)


def _backward(plan: _Tiling, saved: Any, d_out: Array) -> tuple[_Inputs]:
    """The gradients of q, k, v and bias from the gradient `d_out` of the result.

    The inner product of a row of weights with its gradient equals the product of `out` and `d_out`.
    """
    x, out, log_sum = saved
    inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)

    def visit(carry, pair):
        dq, dk, dv, dbias = carry
        i, j = pair
        logits, slope = _logits(plan, x, i, j)
        weights = jnp.exp(logits - _at(log_sum, i)[..., None])
        d_block = _at(d_out, i)
        d_logits = _product("BKGTH,BKHS->BKGTS", d_block, _at(x.v, j))
        d_logits = _dropped(plan, x.dropout_rng, d_logits, i, j)
        d_logits = weights * (d_logits - _at(inner, i)[..., None])
        dropped = _dropped(plan, x.dropout_rng, weights, i, j).astype(x.v.dtype)
        d_product = (d_logits * slope).astype(x.q.dtype)
        dq = _add(dq, _product("BKGTS,BKHS->BKGTH", d_product, _at(x.k, j)), i)
        dk = _add(dk, _product("BKGTH,BKGTS->BKHS", _at(x.q, i), d_product), j)
        dv = _add(dv, _product("BKGTH,BKGTS->BKHS", d_block, dropped), j)
        if dbias is not None:
            dbias = _add_bias(plan, dbias, d_logits, i, j)
        return (dq, dk, dv, dbias), None

    carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tuple(x[:4]))
    gradients, _ = jax.lax.scan(visit, carry, x.visible(plan))
    dq, dk, dv, dbias = jax.tree.map(lambda d, y: d.astype(y.dtype), gradients, tuple(x[:4]))
    return (_Inputs(dq, dk, dv, dbias, None, None),)  # type: ignore[arg-type]


def _add_bias(plan: _Tiling, x: Array, d_logits: Array, i: Array, j: Array) -> Array:
    """The gradient `x` [1 or B, N, T, S] of the bias, with one pair of blocks added."""
    t, s = plan.size
    part = d_logits.reshape(d_logits.shape[0], -1, t, s)
    if x.shape[0] == 1:
        part = part.sum(0, keepdims=True)
    start = (0, 0, i * t, j * s)
    before = jax.lax.dynamic_slice(x, start, part.shape)
    return jax.lax.dynamic_update_slice(x, before + part, start)


_attend.defvjp(_forward, _backward)
