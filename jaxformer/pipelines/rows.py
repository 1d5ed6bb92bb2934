"""Decoding in the rows of a batch: when a text has ended, the next one takes its row."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.distributed import Strategy, strategy_of
from jaxformer.nn.inspection import Patched
from jaxformer.nn.models import DecodingModel
from jaxformer.nn.rounded_parameters import rounded_matrices
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.batching import compile_piece, make_step_fn
from jaxformer.pipelines.ensemble import Ensemble
from jaxformer.pipelines.placement import placed, shardings
from jaxformer.runtime import concurrently
from jaxformer.training.parameters import flatten, map_with_path

FOREVER = np.iinfo(np.int32).max
"""A number of tokens that no text reaches."""


class Text(Protocol):
    """A text that is being decoded."""

    done: bool


_Text = TypeVar("_Text", bound=Text)


class Search(Generic[_Text]):
    """A search in R = `rows` rows of a batch, in compiled pieces; up to `entering` texts enter it
    together.

    `begin(params=params, rows=rows)` is the shape of its state, `more` is `sample_more` or
    `beam_more`. A search of texts of a kind says how they enter, what is read, and what of it a
    text takes. The rows are for `count` texts, at most `most`.
    """

    def __init__(
        self,
        model: DecodingModel,
        params: Any,
        count: int,
        most: int,
        begin: Callable[..., Any],
        more: Callable[..., Any],
    ) -> None:
        self.model, self.params, self.devices = model, params, strategy_of(params)
        parts = self.devices.mesh.shape["data"]
        self.rows: int = num_rows(count, most, parts)
        # Of texts that enter together each part reads as many.
        self.entering: int = max(1, self.rows // 8 // parts) * parts
        begin = partial(begin, rows=self.rows)
        self.state: Any = empty_state(self.devices, self.rows, begin, params)
        numbers = np.int32(0), np.int32(0)
        self._more = self.compile(search_more, np.ones(self.rows, bool), *numbers, more=more)

    def compile(self, jitted: Any, *arrays: Any, **static: Any) -> Callable[..., Any]:
        """The piece `jitted` as a function of the state and `arrays`."""
        return compile_piece(self.model, self.params, jitted, self.state, *arrays, **static)

    def enter(self, state: Any, rows: Int[np.ndarray, " K"], texts: Sequence[_Text]) -> Any:
        """The state with up to K = `entering` texts in these rows."""
        raise NotImplementedError

    def results(self, state: Any) -> Any:
        """What the search has found, as arrays [R, ...]."""
        raise NotImplementedError

    def take(self, text: _Text, row: Any, stopped: bool) -> Any:
        """Adds a row of the `results` to its text; what it returns is yielded by `decode`."""
        raise NotImplementedError

    def decode(self, texts: Sequence[_Text], tokens_at_once: int) -> Iterator[Any]:
        """Decodes `texts` to their ends, at most `tokens_at_once` tokens between two looks at them.

        A text that has stopped before it is done enters again. What a text becomes depends neither
        on its row nor on the time when it enters.
        """
        state, waiting, active = self.state, deque(texts), dict[int, _Text]()
        while waiting or active:
            while waiting and len(active) + min(self.entering, len(waiting)) <= self.rows:
                free = [row for row in range(self.rows) if row not in active]
                new = [waiting.popleft() for _ in range(min(self.entering, len(waiting)))]
                # A number that is no row fills up.
                rows = np.full(self.entering, self.rows, np.int32)
                rows[: len(new)] = free[: len(new)]
                state = self.enter(state, rows, new)
                active.update(zip(free, new, strict=False))
            stop = np.array([row not in active for row in range(self.rows)])
            wanted = min(self.entering, len(waiting))
            enough = stop.sum() + wanted if wanted else self.rows
            state = self._more(state, stop, np.int32(tokens_at_once), np.int32(enough))
            stopped, results = self.devices.gather((state.stopped, self.results(state)))
            for row, text in sorted(active.items()):
                yield self.take(
                    text, jax.tree.map(lambda x, row=row: x[row], results), stopped[row]
                )
                if stopped[row] or text.done:
                    del active[row]
                    if not text.done:
                        waiting.appendleft(text)


def decode_groups(
    groups: Iterable[tuple[list[_Text], Callable[[int], Search[_Text]]]],
    programs: int,
    tokens_at_once: int = FOREVER,
) -> Iterator[Iterator[Any]]:
    """Iterators that decode the texts of each group to their ends, for `programs` at a time.

    A group has texts, and a function that makes the search of as many of them as it is given.
    """
    for texts, make in groups:
        parts = min(programs, len(texts))
        search = make(-(-len(texts) // parts))
        yield from (search.decode(texts[i::parts], tokens_at_once) for i in range(parts))


def run_all(iterators: Iterable[Iterator[Any]], programs: int) -> None:
    """Runs `iterators` to their ends, `programs` at a time."""
    deque(concurrently((partial(deque[Any], each, 0) for each in iterators), programs), 0)


def num_rows(count: int, most: int, parts: int = 1) -> int:
    """The rows for `count` texts: 1, 4, 8, 16, 24, ... or `most`, in a multiple of `parts`.

    They are about as many as one of the equal parts of at most `most` texts has.
    """
    share = -(-count // -(-count // most))
    rows = share if share == 1 else 4 if share <= 6 else -(-share // 8) * 8
    return -(-min(rows, most) // parts) * parts


@partial(jax.jit, static_argnames=("model", "more"), donate_argnames="state")
def search_more(
    model: DecodingModel,
    params: Any,
    state: Any,
    stop: Bool[AnyArray, " R"],
    n: Int[Array, ""] | int,
    ended: Int[Array, ""] | int,
    *,
    more: Callable[..., Any],
) -> Any:
    """`more` (`sample_more` or `beam_more`) by a model, after the rows of `stop` have stopped."""
    state = state.replace(stopped=state.stopped | stop)
    return placed(more(make_step_fn(model, params), state, n, ended))


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
    """The type of each float32 matrix that the model rounds to it wherever it reads the matrix."""
    if jnp.dtype(model.config.dtype) == jnp.float32:
        return {}
    while isinstance(model, Ensemble | Patched):
        if isinstance(model, Ensemble):  # each member rounds its own
            params = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), params)
        model = model.model
    types = rounded_matrices(model, params)
    return {
        path: types[path]
        for path, leaf in flatten(params).items()
        if path in types and leaf.dtype == jnp.float32
    }


def _unstacked(model: Any) -> Any:
    """`model` without `scan_layers`."""
    if not isinstance(model, DecodingModel) or not model.config.scan_layers:
        return model
    return model.clone(config=replace(model.config, scan_layers=False))


def state_shapes(devices: Strategy, rows: int, begin: Callable[..., Any], params: Any) -> Any:
    """The state that `begin(params=params)` returns, as `jax.ShapeDtypeStruct` with shardings."""
    shapes = jax.eval_shape(lambda params: begin(params=params), params)
    if devices.mesh.size == 1:
        return shapes
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        shapes,
        shardings(devices, shapes, rows),
    )


def empty_state(devices: Strategy, rows: int, begin: Callable[..., Any], params: Any) -> Any:
    """The state that `begin(params=params)` returns with zeros, of rows that have stopped."""
    shapes = state_shapes(devices, rows, begin, params)

    def filled(numbers: Any) -> Any:
        state = jax.tree.map(lambda leaf: numbers.zeros(leaf.shape, leaf.dtype), shapes)
        return state.replace(stopped=numbers.ones(rows, bool))

    if devices.mesh.size == 1:
        return filled(np)
    # Each device makes its own part.
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.jit(lambda: filled(jnp), out_shardings=where)()
