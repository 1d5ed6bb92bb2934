"""Attention block by block: the weights [T, S] never exist as a whole."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.dropout import Dropout, Noise
from jaxformer.masks import Mask

# Finite, so that a row without any key stays finite in the forward and the backward pass.
_NEGATIVE = -1e30


def blockwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
    block: int = 256,
) -> jax.Array:
    """Attention [B, T, N, Hv] over blocks of `block` queries and `block` keys.

    A softmax is kept up to date while the blocks of keys pass by (Milakov & Gimelshein 2018;
    Rabe & Staats 2021), and the backward pass computes each block a second time from the
    logarithm of the row's sum (Dao et al. 2022, algorithms 1 and 4). So the memory grows with
    T + S, forward and backward; only a `bias` is as large as its caller made it. Blocks in which
    the facts of `mask` that are known while tracing (causal, window, a number as offset) allow
    nothing are never visited.

    It computes all that the reference kernel does, dropout mask included, with sums in float32.
    On two CPU cores blocks of 256 are faster than those of 128 and 512. Raises `ValueError` for a
    block below 1 and for a window without a direction.
    """
    if block < 1:
        raise ValueError(f"block={block} is a number of queries and keys: give at least 1")
    if dropout is None or dropout.noise is None or dropout.rate == 0.0:
        dropout = Dropout(None, "", 0.0)
    plan = _Plan(
        size=(min(block, q.shape[1]), min(block, k.shape[1])),
        queries=q.shape[1],
        keys=k.shape[1],
        scale=scale,
        causal=mask.causal,
        window=mask.window,
        offset=mask.offset if isinstance(mask.offset, int) else None,
        site=dropout.site,
        rate=dropout.rate,
    )
    return _attend(plan, q, k, v, bias, _Facts.of(mask, dropout.noise))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known while tracing."""

    size: tuple[int, int]
    queries: int
    keys: int
    scale: float
    causal: bool
    window: int | None
    offset: int | None
    site: str
    rate: float

    @property
    def counts(self) -> tuple[int, int]:
        """How many blocks of queries and of keys there are; the last ones may be ragged."""
        return -(-self.queries // self.size[0]), -(-self.keys // self.size[1])

    def pairs(self) -> np.ndarray:
        """The (query block, key block) [P, 2] int32 between which something may be seen."""
        pairs = np.indices(self.counts, dtype=np.int32).reshape(2, -1)
        if not self.causal or self.offset is None:
            return pairs.T
        first_query, first_key = pairs * np.array(self.size)[:, None] + [[self.offset], [0]]
        last_query = first_query + self.size[0] - 1
        seen = first_key <= last_query
        if self.window is not None:
            seen &= first_key + self.size[1] - 1 > first_query - self.window
        return pairs.T[seen]


class _Facts(NamedTuple):
    """What is known while running: the facts of the mask, and the noise of the dropout."""

    offset: jax.Array
    key_valid: jax.Array | None
    query_segments: jax.Array | None
    key_segments: jax.Array | None
    pairs: jax.Array | None
    noise: Noise | None

    @classmethod
    def of(cls, mask: Mask, noise: Noise | None) -> "_Facts":
        offset = jnp.asarray(mask.offset, jnp.int32)
        segments = mask.query_segments, mask.key_segments
        return cls(offset, mask.key_valid, *segments, mask.pairs, noise)


class _Blocks(NamedTuple):
    """The inputs cut into blocks, the blocks leading: dynamic slices of whole blocks are cheap."""

    q: jax.Array  # [blocks, B, K, N/K, t, H]
    k: jax.Array  # [blocks, B, K, s, H]
    v: jax.Array  # [blocks, B, K, s, Hv]
    bias: jax.Array | None  # [1 or B, N, T, S], padded to whole blocks
    mask: Mask  # padded to whole blocks; padded keys are not valid


def _cut(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, bias, facts: _Facts) -> _Blocks:
    """The blocks of attention's inputs."""
    batch = q.shape[0]
    t, s = (-plan.queries % plan.size[0]), (-plan.keys % plan.size[1])
    valid = facts.key_valid
    if s and valid is None:
        valid = jnp.ones((batch, plan.keys), bool)
    mask = Mask(
        causal=plan.causal,
        window=plan.window,
        offset=facts.offset,
        key_valid=_pad(valid, s, 1),
        query_segments=_pad(facts.query_segments, t, 1),
        key_segments=_pad(facts.key_segments, s, 1),
        pairs=_pad(_pad(facts.pairs, t, 1), s, 2),
    )
    return _Blocks(
        _cut_queries(plan, q, k.shape[2]),
        _cut_keys(plan, k),
        _cut_keys(plan, v),
        _pad(_pad(bias, t, 2), s, 3),
        mask,
    )


def _pad(x: jax.Array | None, count: int, axis: int) -> jax.Array | None:
    """`x` with `count` zeros behind it along `axis`."""
    if x is None or count == 0:
        return x
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])


def _cut_queries(plan: _Plan, x: jax.Array, groups: int) -> jax.Array:
    """[B, T, N, ...] as [blocks, B, K, N/K, t, ...]."""
    x = _pad(x, -plan.queries % plan.size[0], 1)
    batch, _, heads, *rest = x.shape
    x = x.reshape(batch, plan.counts[0], plan.size[0], groups, heads // groups, *rest)
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))


def _join_queries(plan: _Plan, x: jax.Array) -> jax.Array:
    """What `_cut_queries` undoes: [blocks, B, K, N/K, t, ...] as [B, T, N, ...]."""
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    batch, count, size, groups, share, *rest = x.shape
    return x.reshape(batch, count * size, groups * share, *rest)[:, : plan.queries]


def _cut_keys(plan: _Plan, x: jax.Array) -> jax.Array:
    """[B, S, K, H] as [blocks, B, K, s, H]."""
    x = _pad(x, -plan.keys % plan.size[1], 1)
    x = x.reshape(x.shape[0], plan.counts[1], plan.size[1], *x.shape[2:])
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))


def _join_keys(plan: _Plan, x: jax.Array) -> jax.Array:
    """What `_cut_keys` undoes: [blocks, B, K, s, H] as [B, S, K, H]."""
    x = jnp.moveaxis(x, (0, 1, 2, 3), (1, 0, 3, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : plan.keys]


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, i, 0)


def _add(x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return _put(x, _at(x, i) + part, i)


def _logits(plan: _Plan, blocks: _Blocks, i: jax.Array, j: jax.Array):
    """Scaled logits [B, K, N/K, t, s] float32 of one pair of blocks, and where they count."""
    q, k = _at(blocks.q, i), _at(blocks.k, j)
    logits = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * plan.scale
    t, s = plan.size
    if blocks.bias is not None:
        part = jax.lax.dynamic_slice(
            blocks.bias, (0, 0, i * t, j * s), (*blocks.bias.shape[:2], t, s)
        )
        logits = logits + part.reshape(part.shape[0], *q.shape[1:3], t, s)
    allowed = blocks.mask.part(i * t, t, j * s, s).dense(t, s)
    return logits, True if allowed is None else allowed[:, :, None]


def _kept(plan: _Plan, noise: Noise, shape: tuple[int, ...], i: jax.Array, j: jax.Array):
    """The dropout factors [B, K, N/K, t, s] of one pair of blocks: 0 or 1/(1 - rate)."""
    t, s = plan.size
    whole = (shape[0], shape[1] * shape[2], t, s)
    keep = noise.keep(plan.site, whole, plan.rate, start=(0, i * t, j * s))
    return jnp.where(keep, 1.0 / (1.0 - plan.rate), 0.0).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q, k, v, bias, facts: _Facts) -> jax.Array:
    return _forward(plan, q, k, v, bias, facts)[0]


def _forward(plan: _Plan, q, k, v, bias, facts: _Facts):
    """Attention, and what the backward pass needs: the inputs, the result, each row's log-sum."""
    blocks = _cut(plan, q, k, v, bias, facts)
    rows = blocks.q.shape[:-1]
    highest = jnp.full(rows, _NEGATIVE, jnp.float32)
    out = jnp.zeros((*rows, v.shape[-1]), jnp.float32)

    def visit(carry, pair):
        highest, total, out = carry
        i, j = pair
        logits, allowed = _logits(plan, blocks, i, j)
        logits = jnp.where(allowed, logits, _NEGATIVE)
        before = _at(highest, i)
        now = jnp.maximum(before, logits.max(-1))
        weights = jnp.where(allowed, jnp.exp(logits - now[..., None]), 0.0)
        shrink = jnp.exp(before - now)
        sums = _at(total, i) * shrink + weights.sum(-1)
        if facts.noise is not None:
            weights = weights * _kept(plan, facts.noise, weights.shape, i, j)
        gathered = _product("BKGTS,BKSH->BKGTH", weights.astype(v.dtype), _at(blocks.v, j))
        gathered = _at(out, i) * shrink[..., None] + gathered
        return (_put(highest, now, i), _put(total, sums, i), _put(out, gathered, i)), None

    carry = highest, jnp.zeros_like(highest), out
    (highest, total, out), _ = jax.lax.scan(visit, carry, plan.pairs())
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = jnp.where(some[..., None], out / total[..., None], 0.0)
    out = _join_queries(plan, out).astype(v.dtype)
    return out, (q, k, v, bias, facts, out, highest + jnp.log(total))


def _product(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def _backward(plan: _Plan, saved, slope: jax.Array):
    """The slopes of q, k, v and bias from the `slope` [B, T, N, Hv] of the result.

    The inner product of a row of weights with its slope is that of the result with its own.
    """
    q, k, v, bias, facts, out, log_sum = saved
    blocks = _cut(plan, q, k, v, bias, facts)
    inner = (out.astype(jnp.float32) * slope.astype(jnp.float32)).sum(-1)
    inner, slopes = (_cut_queries(plan, x, k.shape[2]) for x in (inner, slope))

    def visit(carry, pair):
        dq, dk, dv, dbias = carry
        i, j = pair
        logits, allowed = _logits(plan, blocks, i, j)
        weights = jnp.where(allowed, jnp.exp(logits - _at(log_sum, i)[..., None]), 0.0)
        given = _at(slopes, i)
        pull = _product("BKGTH,BKSH->BKGTS", given, _at(blocks.v, j))
        kept = weights
        if facts.noise is not None:
            factors = _kept(plan, facts.noise, weights.shape, i, j)
            kept, pull = weights * factors, pull * factors
        pull = weights * (pull - _at(inner, i)[..., None])
        low = (pull * plan.scale).astype(q.dtype)
        dq = _add(dq, _product("BKGTS,BKSH->BKGTH", low, _at(blocks.k, j)), i)
        dk = _add(dk, _product("BKGTS,BKGTH->BKSH", low, _at(blocks.q, i)), j)
        dv = _add(dv, _product("BKGTS,BKGTH->BKSH", kept.astype(v.dtype), given), j)
        return (dq, dk, dv, _add_bias(plan, dbias, pull, i, j)), None

    carry = [None if x is None else jnp.zeros(x.shape, jnp.float32) for x in blocks[:4]]
    (dq, dk, dv, dbias), _ = jax.lax.scan(visit, tuple(carry), plan.pairs())
    dk, dv = (_join_keys(plan, x).astype(y.dtype) for x, y in ((dk, k), (dv, v)))
    if bias is not None:
        dbias = dbias[:, :, : plan.queries, : plan.keys].astype(bias.dtype)
    return _join_queries(plan, dq).astype(q.dtype), dk, dv, dbias, None


def _add_bias(plan: _Plan, x: jax.Array | None, pull: jax.Array, i: jax.Array, j: jax.Array):
    """The bias's slope `x` [1 or B, N, T, S] with that of one pair of blocks added."""
    if x is None:
        return None
    t, s = plan.size
    part = pull.reshape(pull.shape[0], -1, t, s)
    if x.shape[0] == 1:
        part = part.sum(0, keepdims=True)
    start = (0, 0, i * t, j * s)
    before = jax.lax.dynamic_slice(x, start, part.shape)
    return jax.lax.dynamic_update_slice(x, before + part, start)


_attend.defvjp(_forward, _backward)
