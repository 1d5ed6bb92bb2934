"""Decoding in the rows of a batch: when a text has ended, the next one takes its row."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from jaxformer.distributed import Strategy, strategy_of
from jaxformer.distributed.batches import global_array
from jaxformer.nn.models import DecodingModel
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.batching import make_step_fn
from jaxformer.training.parameters import map_with_path

FOREVER = np.iinfo(np.int32).max
"""A number of tokens that no text reaches."""

Piece = Callable[..., Any]


class Text(Protocol):
    """A text that is being decoded."""

    done: bool


_Text = TypeVar("_Text", bound=Text)


@dataclass(frozen=True)
class Search:
    """The compiled pieces of a search in R = `rows` rows.

    `enter(state, rows [K], texts)` is the state with up to K = `entering` texts in these rows,
    `more(state, stop [R], n, ended)` that with up to n more tokens of each text, of which those of
    `stop` get none; it returns when `ended` rows have stopped. `read(state)` gives `stopped` and
    results, arrays [R, ...] of numpy.
    """

    rows: int
    state: Any
    enter: Callable[[Any, Int[np.ndarray, " K"], Sequence[Any]], Any]
    more: Piece
    read: Callable[[Any], tuple[Any, Any]]

    @property
    def entering(self) -> int:
        """K."""
        return entering_rows(self.rows)


def entering_rows(rows: int) -> int:
    """How many texts enter `rows` rows together."""
    return max(1, rows // 8)


def num_rows(count: int, most: int, parts: int = 1) -> int:
    """The rows for `count` texts: 1, 4, 8, 16, 24, ... or `most`, in a multiple of `parts`.

    They are about as many as one of the equal parts of at most `most` texts has.
    """
    share = -(-count // -(-count // most))
    rows = share if share == 1 else 4 if share <= 6 else -(-share // 8) * 8
    return -(-min(rows, most) // parts) * parts


def decode_rows(
    search: Search,
    texts: Sequence[_Text],
    take: Callable[[_Text, Any, bool], Any],
    tokens_at_once: int,
) -> Iterator[Any]:
    """Decodes `texts` to their ends, at most `tokens_at_once` tokens between two looks at them.

    `take(text, row, stopped)` adds what the search has found for a text, a row of its results; what
    it returns is yielded. A text that has stopped before it is done enters again. What a text
    becomes depends neither on its row nor on the time when it enters.
    """
    state, waiting, active = search.state, deque(texts), dict[int, _Text]()
    while waiting or active:
        while waiting and len(active) + min(search.entering, len(waiting)) <= search.rows:
            free = [row for row in range(search.rows) if row not in active]
            new = [waiting.popleft() for _ in range(min(search.entering, len(waiting)))]
            # A number that is no row fills up.
            rows = np.full(search.entering, search.rows, np.int32)
            rows[: len(new)] = free[: len(new)]
            state = search.enter(state, rows, new)
            active.update(zip(free, new, strict=False))
        stop = np.array([row not in active for row in range(search.rows)])
        wanted = min(search.entering, len(waiting))
        enough = stop.sum() + wanted if wanted else search.rows
        state = search.more(state, stop, np.int32(tokens_at_once), np.int32(enough))
        stopped, results = search.read(state)
        for row, text in sorted(active.items()):
            yield take(text, jax.tree.map(lambda x, row=row: x[row], results), stopped[row])
            if stopped[row] or text.done:
                del active[row]
                if not text.done:
                    waiting.appendleft(text)


@partial(jax.jit, static_argnames=("model", "more"), donate_argnames="state")
def search_more(
    model: DecodingModel,
    params: Any,
    state: Any,
    stop: Bool[AnyArray, " R"],
    n: Int[Array, ""] | int,
    ended: Int[Array, ""] | int,
    *,
    more: Piece,
) -> Any:
    """`more` (`sample_more` or `beam_more`) by a model, after the rows of `stop` have stopped."""
    state = state.replace(stopped=state.stopped | stop)
    return more(make_step_fn(model, params), state, n, ended)


def prepare(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and parameters as each step reads them: on the devices, in the model's type.

    Layers that `scan_layers` has stacked are apart: a step of decoding then reads weights and cache
    of a layer where they are, and a scan would copy them out of its stacked arrays for each token.
    """
    plain, devices = _unstacked(model), strategy_of(params)
    if any(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
        params = devices.shard_state(params)
    if plain == model and not _lower(model, params):
        return model, params
    with devices.active():
        return plain, _jitted_lay_out(model, params)


def lay_out(model: Any, params: Any) -> tuple[Any, Any]:
    """`prepare` as a pure function."""
    plain, dtypes = _unstacked(model), _lower(model, params)
    params = map_with_path(lambda path, leaf: leaf.astype(dtypes.get(path, leaf.dtype)), params)
    return plain, params if plain == model else unstack_blocks(params)


@partial(jax.jit, static_argnames="model")
def _jitted_lay_out(model: Any, params: Any) -> Any:
    return lay_out(model, params)[1]


def _lower(model: Any, params: Any) -> dict[str, Any]:
    """The dtype of each matrix that a module rounds to the model's type whenever it is used."""
    dtype, dtypes = jnp.dtype(model.config.dtype), {}

    def note(path: str, leaf: Any) -> None:
        is_matrix = path.rpartition("/")[2] in ("kernel", "table")
        if is_matrix and leaf.dtype == jnp.float32 and dtype != jnp.float32:
            dtypes[path] = dtype

    map_with_path(note, params)
    return dtypes


def _unstacked(model: Any) -> Any:
    """`model` without `scan_layers`."""
    if not isinstance(model, DecodingModel) or not model.config.scan_layers:
        return model
    return model.clone(config=replace(model.config, scan_layers=False))


def state_shapes(devices: Strategy, rows: int, begin: Callable[..., Any], params: Any) -> Any:
    """The state that `begin(params=params)` returns, as `jax.ShapeDtypeStruct` with shardings."""
    parts = devices.mesh.shape["data"]

    def placed(leaf: jax.ShapeDtypeStruct) -> Any:
        if devices.mesh.size == 1:
            return leaf
        divided = leaf.ndim > 0 and leaf.shape[0] == rows and rows % parts == 0
        spec = PartitionSpec("data") if divided else PartitionSpec()
        return leaf.update(sharding=NamedSharding(devices.mesh, spec))

    return jax.tree.map(placed, jax.eval_shape(lambda params: begin(params=params), params))


def empty_state(devices: Strategy, rows: int, begin: Callable[..., Any], params: Any) -> Any:
    """The state that `begin(params=params)` returns with zeros, of rows that have stopped."""

    def filled(value: int, leaf: jax.ShapeDtypeStruct) -> Any:
        array = np.full(leaf.shape, value, leaf.dtype)
        return array if devices.mesh.size == 1 else global_array(array, leaf.sharding)

    shapes = state_shapes(devices, rows, begin, params)
    state = jax.tree.map(partial(filled, 0), shapes)
    return state.replace(stopped=filled(1, shapes.stopped))


def compile_piece(
    model: Any, params: Any, jitted: Any, *arrays: Any, **static: Any
) -> Callable[..., Any]:
    """`jitted(model, params, *arrays, **static)` as a function of `arrays`.

    For one device it is compiled here, under the caller's settings of JAX, which threads do not
    share.
    """
    devices = strategy_of(params)
    if devices.mesh.size > 1 or jax.config.jax_disable_jit:  # type: ignore[attr-defined]

        def run(*arrays: Any) -> Any:
            with devices.active():
                return jitted(model, params, *arrays, **static)

        return run
    # Shapes, because arrays remember the mesh of the program that made them: one program for all.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, arrays))
    compiled = jitted.lower(model, shapes[0], *shapes[1], **static).compile()
    return lambda *arrays: compiled(params, *arrays)
