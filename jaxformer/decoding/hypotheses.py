"""Shared by beam search and sampling: steps, growing hypotheses, and the largest logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32, Real, Shaped

from jaxformer.decoding.logits_processors import LogitsProcessor
from jaxformer.decoding.settings import LogitsConfig
from jaxformer.ops.manual_axes import varying_axes
from jaxformer.ops.partitioning import axis_that_divides, partitioned
from jaxformer.ops.rows import put_rows_into, take_rows_of

State = TypeVar("State", bound=Any)
Config = TypeVar("Config", bound=LogitsConfig)
AnyArray = Array | np.ndarray
Step = Callable[[Int[Array, "B W"], Any], tuple[Float[Array, "B W V"], Any]]
"""step(tokens [B, W], cache) -> (logits [B, W, V], cache), with W hypotheses per sentence."""

_CHUNK = 128


class Hypotheses(NamedTuple):
    """W continuations of each of B sentences, best first."""

    tokens: Int[Array, "B W L"]
    """Token ids up to and including EOS, then zeros."""
    scores: Float[Array, "B W"]
    """The sum of `log_probs` under the length penalty; -inf where there is no hypothesis."""
    log_probs: Float[Array, "B W L"]
    """The log-probability (nats) of each token, then zeros."""


def empty_hypotheses(batch: int, beam_size: int, size: int) -> Hypotheses:
    """Hypotheses without a token, with space for `size` tokens, whose scores are -inf."""
    return Hypotheses(
        jnp.zeros((batch, beam_size, size), jnp.int32),
        jnp.full((batch, beam_size), -jnp.inf, jnp.float32),
        jnp.zeros((batch, beam_size, size), jnp.float32),
    )


def append_tokens(
    hypotheses: Hypotheses,
    tokens: Int[Array, "B W"],
    log_probs: Float[Array, "B W"],
    index: Int[Array, " B"],
) -> Hypotheses:
    """`hypotheses` with `tokens` at `index`; their log-probabilities are added to the scores."""
    is_place = jnp.arange(hypotheses.tokens.shape[-1])[None, None] == index[:, None, None]
    return Hypotheses(
        jnp.where(is_place, tokens[..., None], hypotheses.tokens),
        hypotheses.scores + log_probs,
        jnp.where(is_place, log_probs[..., None], hypotheses.log_probs),
    )


def gather_beams(hypotheses: Hypotheses, chosen: Int[Array, "B C"]) -> Hypotheses:
    """Hypothesis `chosen[b, c]` of each sentence b."""
    return Hypotheses(
        jnp.take_along_axis(hypotheses.tokens, chosen[..., None], axis=1),
        jnp.take_along_axis(hypotheses.scores, chosen, axis=1),
        jnp.take_along_axis(hypotheses.log_probs, chosen[..., None], axis=1),
    )


def is_among(tokens: Int[Array, "*shape"], ids: Sequence[int]) -> Bool[Array, "*shape"]:
    """Whether each token is in `ids`."""
    return jnp.isin(tokens, np.asarray(ids, np.int32))


def check_batch(first: Int[AnyArray, " B"]) -> None:
    """Raises `ValueError` for a batch of no sentences."""
    if not len(first):
        raise ValueError("the batch is empty: give at least one sentence")


def check_logits(
    logits: Float[Array, "B W V"], tokens: Int[Array, "B W"], eos: Sequence[int]
) -> None:
    """Raises `ValueError` for logits of a wrong shape and for `eos` outside the vocabulary."""
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"the step function returned logits of shape {logits.shape} for tokens of shape "
            f"{tokens.shape}: it must return [B, W, V] for [B, W]"
        )
    if not all(0 <= token < logits.shape[-1] for token in eos):
        raise ValueError(
            f"eos={tuple(eos)}, but the step function's logits are of the tokens 0 to "
            f"{logits.shape[-1] - 1}: give EOS ids among them"
        )


def check_room(cache: Any, count: int) -> None:
    """Raises `ValueError` for a cache that knows its size and has no room for `count` tokens."""
    if hasattr(cache, "check_room"):
        cache.check_room(count)


def check_beams(cache: Any, beam_size: int) -> None:
    """Raises `ValueError` for a cache that knows the number of its beams and has another one."""
    beams = getattr(cache, "num_beams", beam_size)
    if beams != beam_size:
        raise ValueError(
            f"the cache is for num_beams={beams} of a sentence, but beam_size={beam_size}: give "
            f"num_beams={beam_size} to init_cache"
        )


def largest(values: Int[AnyArray, " B"]) -> int:
    """The largest of `values`, at least 0; they may not be traced, but the caller may be."""
    return int(np.asarray(values).max(initial=0))


def row_values(config: LogitsConfig, batch: int) -> dict[str, Shaped[np.ndarray, " B"]]:
    """The fields `VALUES` of `config` as one number per sentence."""

    def column(name: str) -> Shaped[np.ndarray, " B"]:
        is_float = isinstance(getattr(type(config), name), float)  # its default
        return np.full(batch, getattr(config, name), np.float32 if is_float else np.int32)

    return {name: column(name) for name in config.VALUES}


def without_values(config: Config) -> Config:
    """`config` with the defaults of its fields `VALUES`, of which a program does not depend."""
    return replace(config, **{name: getattr(type(config), name) for name in config.VALUES})


@dataclass(frozen=True)
class Rules:
    """Static arguments of a search: its settings without their `VALUES`, and functions."""

    config: Any
    eos: tuple[int, ...]
    logits_processors: tuple[LogitsProcessor, ...]


class DecodeState(struct.PyTreeNode):
    """B sentences that are being decoded.

    `values` are the sentences' own settings, by the name of the field (`VALUES`). `lengths` says
    how many tokens are written; `limits` are the most new ones. `last` are the tokens of the last
    step.
    """

    cache: Any
    values: Mapping[str, Shaped[AnyArray, " B"]]
    limits: Int[Array, " B"]
    lengths: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    last: Int[Array, "B ..."]
    rules: Rules = struct.field(pytree_node=False)


def advance_until(
    advance: Callable[[State], State],
    state: State,
    count: Int[Array, ""] | int,
    ended: Int[Array, ""] | int | None,
) -> State:
    """`state` after `advance` was called up to `count` times.

    It is called until `ended` of the sentences have stopped; None: until all have.
    """
    enough = len(state.stopped) if ended is None else ended

    def goes_on(carry: tuple[Array, State]) -> Bool[Array, ""]:
        done, state = carry
        return (done < count) & (state.stopped.sum() < enough)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, advance(carry[1])

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]


def take_rows(tree: Any, rows: Int[AnyArray, " K"]) -> Any:
    """The sentences `rows` of a state or cache, whose leaves have the axis B first.

    A number holds for all sentences. A node with a method `take_rows(rows)` does it itself.
    """

    def take(x: Any) -> Any:
        return x.take_rows(rows) if hasattr(x, "take_rows") else take_rows_of(x, rows)

    return jax.tree.map(take, tree, is_leaf=lambda x: hasattr(x, "take_rows"))


def put_rows(tree: Any, rows: Int[AnyArray, " K"], new: Any) -> Any:
    """`tree` with the K sentences of `new` in `rows`; a row outside of it is left out.

    A node with a method `put_rows(rows, new)` does it itself. Raises `ValueError` for a number of
    all sentences, such as the length of a cache from `init_cache`.
    """

    def put(x: Any, y: Any) -> Any:
        return x.put_rows(rows, y) if hasattr(x, "put_rows") else put_rows_into(x, rows, y)

    return jax.tree.map(put, tree, new, is_leaf=lambda x: hasattr(x, "put_rows"))


def top_k(x: Real[Array, "*R V"], count: int) -> tuple[Real[Array, "*R k"], Int32[Array, "*R k"]]:
    """The `count` largest numbers of each row, largest first, and their indices.

    The plain twin is `jax.lax.top_k`. Both give the same result: of equal numbers the first ones.
    On a CPU this function takes about a quarter of the time for a few numbers of a vocabulary. On
    other platforms it calls `jax.lax.top_k` with a matrix, which a TPU's compiler computes without
    a sort; with more axes it sorts. Where the mesh axis "tensor", "sequence" or "fsdp" divides
    the vocabulary, each device finds the best of its part, and the devices exchange only these.
    Where "data" divides the rows, each device has its own.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    axes = (axis_that_divides(name, size) for name in ("tensor", "sequence", "fsdp"))
    axis = next((axis for axis in axes if axis is not None), None)
    if axis is not None and size // partitioned((axis,))[axis] > count:
        values, indices = _top_k_of_parts(rows, count, axis)
    elif axis_that_divides("data", len(rows)):
        values, indices = _on_devices(partial(_top_k_of_rows, count=count), rows, None)
    else:
        values, indices = _top_k_of_rows(rows, count)
    shape = *x.shape[:-1], count
    return values.reshape(shape), indices.reshape(shape)


def _top_k_of_rows(
    rows: Real[Array, "R V"], count: int
) -> tuple[Real[Array, "R k"], Int32[Array, "R k"]]:
    def plain(rows: Array) -> tuple[Array, Array]:
        values, indices = jax.lax.top_k(rows, count)
        return values, indices

    if rows.shape[1] <= 2 * count * _CHUNK:
        return plain(rows)
    in_chunks = partial(_top_k_in_chunks, count=count)
    return jax.lax.platform_dependent(rows, cpu=in_chunks, default=plain)


def _top_k_of_parts(
    rows: Real[Array, "R V"], count: int, axis: str
) -> tuple[Real[Array, "R k"], Int32[Array, "R k"]]:
    """`jax.lax.top_k` of columns that mesh `axis` divides, from the best of each device."""

    def best_of_part(part: Array) -> tuple[Array, Array]:
        values, indices = _top_k_of_rows(part, count)
        return values, indices + jax.lax.axis_index(axis) * part.shape[1]

    values, indices = _on_devices(best_of_part, rows, axis)
    # The first of equal numbers is chosen: within its part, and of the parts the first.
    best, chosen = jax.lax.top_k(values, count)
    return best, jnp.take_along_axis(indices, chosen, axis=1)


def _on_devices(
    best: Callable[[Array], tuple[Array, Array]], rows: Real[Array, "R V"], axis: str | None
) -> tuple[Array, Array]:
    """`best(rows)`, of the rows that a device has along "data", and the columns along `axis`."""
    spec = PartitionSpec(axis_that_divides("data", len(rows)), axis)
    return jax.shard_map(
        best,
        in_specs=spec,
        out_specs=(spec, spec),
        axis_names={*jax.sharding.get_abstract_mesh().auto_axes},
        check_vma=bool(varying_axes(rows)),
    )(rows)


def _top_k_in_chunks(
    x: Real[Array, "R V"], count: int
) -> tuple[Real[Array, "R k"], Int32[Array, "R k"]]:
    """`jax.lax.top_k`, searching only the `count` chunks of each row with the largest maxima."""
    chunks = -(-x.shape[1] // _CHUNK)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    padding = ((0, 0), (0, chunks * _CHUNK - x.shape[1]))
    x = jnp.pad(x, padding, constant_values=lowest).reshape(-1, chunks, _CHUNK)
    _, chosen = jax.lax.top_k(x.max(axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # among equal numbers the first one is chosen
    candidates = jnp.take_along_axis(x, chosen[:, :, None], axis=1)
    values, position = jax.lax.top_k(candidates.reshape(-1, count * _CHUNK), count)
    chunk = jnp.take_along_axis(chosen, position // _CHUNK, axis=1)
    return values, chunk * _CHUNK + position % _CHUNK
