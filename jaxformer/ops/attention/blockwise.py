"""Attention block by block: the matrix of weights [T, S] is never stored."""

import dataclasses
from functools import partial
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.spec import FLASH_RESIDUALS
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import MASKED_LOGIT, AnyArray, AttentionMask, check_mask


def blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: Dropout | None = None,
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
    check_mask(mask)
    if block < 1:
        raise ConfigError(f"block={block} is a number of queries and keys: give at least 1")
    if dropout is None or dropout.dropout_rng is None or dropout.rate == 0.0:
        dropout = Dropout(None, "", 0.0)
    plan = _Plan(
        size=(min(block, q.shape[1]), min(block, k.shape[1])),
        queries=q.shape[1],
        keys=k.shape[1],
        scale=scale,
        causal=mask.causal,
        window=mask.window,
        offset=mask.offset if isinstance(mask.offset, int) else None,
        dropout_name=dropout.name,
        rate=dropout.rate,
        softcap=softcap,
    )
    return _attend(plan, q, k, v, bias, _MaskArrays.create(mask, dropout.dropout_rng))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments."""

    size: tuple[int, int]
    queries: int
    keys: int
    scale: float
    causal: bool
    window: int | None
    offset: int | None
    dropout_name: str
    rate: float
    softcap: float | None

    @property
    def counts(self) -> tuple[int, int]:
        """The number of blocks of queries and of keys; the last ones may be ragged."""
        return -(-self.queries // self.size[0]), -(-self.keys // self.size[1])

    def visible(self) -> np.ndarray:
        """The pairs (query block, key block) [P, 2] int32 in which a query may see a key."""
        pairs = np.indices(self.counts, dtype=np.int32).reshape(2, -1)
        if not self.causal or self.offset is None:
            return pairs.T
        first_query, first_key = pairs * np.array(self.size)[:, None] + [[self.offset], [0]]
        last_query = first_query + self.size[0] - 1
        seen = first_key <= last_query
        if self.window is not None:
            seen &= first_key + self.size[1] - 1 > first_query - self.window
        return pairs.T[seen]


class _MaskArrays(NamedTuple):
    """Traced arguments: the arrays of the mask and the randomness of dropout."""

    offset: Array
    padding_mask: AnyArray | None
    query_segments: AnyArray | None
    key_segments: AnyArray | None
    explicit: AnyArray | None
    dropout_rng: DropoutRng | None

    @classmethod
    def create(cls, mask: AttentionMask, dropout_rng: DropoutRng | None) -> "_MaskArrays":
        offset = jnp.asarray(mask.offset, jnp.int32)
        segments = mask.query_segments, mask.key_segments
        return cls(offset, mask.padding_mask, *segments, mask.explicit, dropout_rng)


class _Blocks(NamedTuple):
    """The inputs cut into blocks along axis 0, where dynamic slices are cheap."""

    q: Array  # [blocks, B, K, N/K, t, H]
    k: Array  # [blocks, B, K, s, H]
    v: Array  # [blocks, B, K, s, Hv]
    bias: Array | None  # [1 or B, N, T, S], padded to whole blocks
    mask: AttentionMask  # padded to whole blocks; padded keys are masked


def _cut(plan: _Plan, q: Array, k: Array, v: Array, bias, arrays: _MaskArrays) -> _Blocks:
    """The blocks of attention's inputs."""
    batch = q.shape[0]
    t, s = (-plan.queries % plan.size[0]), (-plan.keys % plan.size[1])
    valid = arrays.padding_mask
    if s and valid is None:
        valid = jnp.ones((batch, plan.keys), bool)
    mask = AttentionMask(
        causal=plan.causal,
        window=plan.window,
        offset=arrays.offset,
        padding_mask=_pad(valid, s, 1),
        query_segments=_pad(arrays.query_segments, t, 1),
        key_segments=_pad(arrays.key_segments, s, 1),
        explicit=_pad(_pad(arrays.explicit, t, 1), s, 2),
    )
    return _Blocks(
        _cut_queries(plan, q, k.shape[2]),
        _cut_keys(plan, k),
        _cut_keys(plan, v),
        _pad(_pad(bias, t, 2), s, 3),
        mask,
    )


@overload
def _pad(x: AnyArray, count: int, axis: int) -> Array: ...


@overload
def _pad(x: None, count: int, axis: int) -> None: ...


def _pad(x: AnyArray | None, count: int, axis: int) -> Array | None:
    """`x` with `count` zeros appended along `axis`."""
    if x is None:
        return None
    if count == 0:
        return jnp.asarray(x)
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])


def _cut_queries(plan: _Plan, x: Array, groups: int) -> Array:
    """[B, T, N, ...] as [blocks, B, K, N/K, t, ...]."""
    x = _pad(x, -plan.queries % plan.size[0], 1)
    batch, _, heads, *rest = x.shape
    x = x.reshape(batch, plan.counts[0], plan.size[0], groups, heads // groups, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))


def _join_queries(plan: _Plan, x: Array) -> Array:
    """The inverse of `_cut_queries`: [blocks, B, K, N/K, t, ...] as [B, T, N, ...]."""
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    batch, count, size, groups, share, *rest = x.shape
    return x.reshape(batch, count * size, groups * share, *rest)[:, : plan.queries]


def _cut_keys(plan: _Plan, x: Array) -> Array:
    """[B, S, K, H] as [blocks, B, K, s, H]."""
    x = _pad(x, -plan.keys % plan.size[1], 1)
    x = x.reshape(x.shape[0], plan.counts[1], plan.size[1], *x.shape[2:])
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))


def _join_keys(plan: _Plan, x: Array) -> Array:
    """The inverse of `_cut_keys`: [blocks, B, K, s, H] as [B, S, K, H]."""
    x = jnp.moveaxis(x, (0, 1, 2, 3), (1, 0, 3, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : plan.keys]


def _at(x: Array, i: Array) -> Array:
    """Block `i` of `x`."""
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: Array, part: Array, i: Array) -> Array:
    """`x` with `part` as its block `i`."""
    return jax.lax.dynamic_update_index_in_dim(x, part, i, 0)


def _add(x: Array, part: Array, i: Array) -> Array:
    """`x` with `part` added to its block `i`."""
    return _put(x, _at(x, i) + part, i)


def _logits(plan: _Plan, blocks: _Blocks, i: Array, j: Array):
    """Logits [B, K, N/K, t, s] float32 of one pair of blocks, which are allowed, and their slopes.

    The slope is the derivative of a logit by the product of query and key.
    """
    q, k = _at(blocks.q, i), _at(blocks.k, j)
    logits = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * plan.scale
    slope: Array | float = plan.scale
    if plan.softcap is not None:
        tanh = jnp.tanh(logits / plan.softcap)
        logits, slope = plan.softcap * tanh, plan.scale * (1 - tanh * tanh)
    t, s = plan.size
    if blocks.bias is not None:
        part = jax.lax.dynamic_slice(
            blocks.bias, (0, 0, i * t, j * s), (*blocks.bias.shape[:2], t, s)
        )
        logits = logits + part.reshape(part.shape[0], *q.shape[1:3], t, s)
    allowed = blocks.mask.slice(i * t, t, j * s, s).materialize(t, s)
    return logits, True if allowed is None else allowed[:, :, None], slope


def _dropout_factors(
    plan: _Plan, dropout_rng: DropoutRng, shape: tuple[int, ...], i: Array, j: Array
):
    """The dropout factors [B, K, N/K, t, s] of one pair of blocks: 0 or 1/(1 - rate)."""
    t, s = plan.size
    whole = (shape[0], shape[1] * shape[2], t, s)
    keep = dropout_rng.keep_mask(plan.dropout_name, whole, plan.rate, start=(0, i * t, j * s))
    return jnp.where(keep, 1.0 / (1.0 - plan.rate), 0.0).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q, k, v, bias, arrays: _MaskArrays) -> Array:
    return _forward(plan, q, k, v, bias, arrays)[0]


def _forward(plan: _Plan, q, k, v, bias, arrays: _MaskArrays):
    """Attention, and what the backward pass needs: inputs, result, logarithm of each row's sum."""
    blocks = _cut(plan, q, k, v, bias, arrays)
    rows = blocks.q.shape[:-1]
    highest = jnp.full(rows, MASKED_LOGIT, jnp.float32)
    out = jnp.zeros((*rows, v.shape[-1]), jnp.float32)

    def visit(carry, pair):
        highest, total, out = carry
        i, j = pair
        logits, allowed, _ = _logits(plan, blocks, i, j)
        logits = jnp.where(allowed, logits, MASKED_LOGIT)
        before = _at(highest, i)
        now = jnp.maximum(before, logits.max(-1))
        weights = jnp.where(allowed, jnp.exp(logits - now[..., None]), 0.0)
        shrink = jnp.exp(before - now)
        sums = _at(total, i) * shrink + weights.sum(-1)
        if arrays.dropout_rng is not None:
            weights = weights * _dropout_factors(plan, arrays.dropout_rng, weights.shape, i, j)
        gathered = _product("BKGTS,BKSH->BKGTH", weights.astype(v.dtype), _at(blocks.v, j))
        gathered = _at(out, i) * shrink[..., None] + gathered
        return (_put(highest, now, i), _put(total, sums, i), _put(out, gathered, i)), None

    carry = highest, jnp.zeros_like(highest), out
    (highest, total, out), _ = jax.lax.scan(visit, carry, plan.visible())
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[..., None], out / total[..., None], 0.0)
    out = _join_queries(plan, out).astype(v.dtype)
    out, log_sum = checkpoint_name((out, highest + jnp.log(total)), FLASH_RESIDUALS)
    return out, (q, k, v, bias, arrays, out, log_sum)


def _product(equation: str, *operands: Array) -> Array:
    """`jnp.einsum` with sums in float32."""
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def _backward(plan: _Plan, saved, d_out: Array):
    """The gradients of q, k, v and bias from the gradient `d_out` [B, T, N, Hv] of the result.

    The inner product of a row of weights with its gradient equals that of `out` with `d_out`.
    """
    q, k, v, bias, arrays, out, log_sum = saved
    blocks = _cut(plan, q, k, v, bias, arrays)
    inner = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    inner, d_outs = (_cut_queries(plan, x, k.shape[2]) for x in (inner, d_out))

    def visit(carry, pair):
        dq, dk, dv, dbias = carry
        i, j = pair
        logits, allowed, slope = _logits(plan, blocks, i, j)
        weights = jnp.where(allowed, jnp.exp(logits - _at(log_sum, i)[..., None]), 0.0)
        d_block = _at(d_outs, i)
        d_logits = _product("BKGTH,BKSH->BKGTS", d_block, _at(blocks.v, j))
        dropped = weights
        if arrays.dropout_rng is not None:
            factors = _dropout_factors(plan, arrays.dropout_rng, weights.shape, i, j)
            dropped, d_logits = weights * factors, d_logits * factors
        d_logits = weights * (d_logits - _at(inner, i)[..., None])
        low = (d_logits * slope).astype(q.dtype)
        dq = _add(dq, _product("BKGTS,BKSH->BKGTH", low, _at(blocks.k, j)), i)
        dk = _add(dk, _product("BKGTS,BKGTH->BKSH", low, _at(blocks.q, i)), j)
        dv = _add(dv, _product("BKGTS,BKGTH->BKSH", dropped.astype(v.dtype), d_block), j)
        return (dq, dk, dv, _add_bias(plan, dbias, d_logits, i, j)), None

    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tuple(blocks[:4]))
    (dq, dk, dv, dbias), _ = jax.lax.scan(visit, carry, plan.visible())
    dk, dv = (_join_keys(plan, x).astype(y.dtype) for x, y in ((dk, k), (dv, v)))
    if dbias is not None:
        dbias = dbias[:, :, : plan.queries, : plan.keys].astype(bias.dtype)
    return _join_queries(plan, dq).astype(q.dtype), dk, dv, dbias, None


def _add_bias(plan: _Plan, x: Array | None, d_logits: Array, i: Array, j: Array):
    """The gradient `x` [1 or B, N, T, S] of the bias, with that of one pair of blocks added."""
    if x is None:
        return None
    t, s = plan.size
    part = d_logits.reshape(d_logits.shape[0], -1, t, s)
    if x.shape[0] == 1:
        part = part.sum(0, keepdims=True)
    start = (0, 0, i * t, j * s)
    before = jax.lax.dynamic_slice(x, start, part.shape)
    return jax.lax.dynamic_update_slice(x, before + part, start)


_attend.defvjp(_forward, _backward)
