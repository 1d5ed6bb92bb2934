"""Decoding in the rows of a batch: when a text has ended, the next one takes its row.

The texts of a call are decoded in pieces of some tokens, each a run of a compiled program. Between
two pieces, texts that have ended leave their rows, others enter, and a Ctrl-C ends the call.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.distributed import Strategy, strategy_of
from jaxformer.nn.models import DecodingModel
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.pieces import compile_piece, only_on
from jaxformer.pipelines.placement import placed, shardings
from jaxformer.pipelines.step_fn import make_step_fn
from jaxformer.runtime import collect_concurrently

FOREVER = np.iinfo(np.int32).max
"""A number of tokens that no text reaches."""

_FEWEST = 8
"""The tokens of a piece where somebody waits for each of them."""
_TOGETHER = 64
"""The tokens of a piece where several processes decode together."""


class Text(Protocol):
    """A text that is being decoded."""

    done: bool


_Request = TypeVar("_Request")
_Text = TypeVar("_Text", bound=Text)
_Update = TypeVar("_Update")


@dataclass(frozen=True)
class Pace:
    """The number of tokens in a piece, and whether pieces become longer."""

    tokens: int = _FEWEST
    seconds: float = 0.0
    """Pieces grow until one takes at least half as long, and shrink where it takes longer; 0: all
    have as many `tokens`."""

    def after(self, elapsed: float) -> "Pace":
        """The pace after a piece that took `elapsed` seconds."""
        if self.seconds == 0:
            return self
        if elapsed < self.seconds / 2:
            return replace(self, tokens=min(2 * self.tokens, FOREVER))
        if elapsed > self.seconds:
            return replace(self, tokens=max(self.tokens // 2, _FEWEST))
        return self


STEADY = Pace()
"""Pieces of 8 tokens: texts are shown while they are written, or end at stop strings."""


def pace_of_whole_texts() -> Pace:
    """The pace where nobody reads a text before its end: pieces of about a second.

    Several processes run one program, so all pieces have the same length there.
    """
    if jax.process_count() > 1:
        return Pace(_TOGETHER)
    return Pace(seconds=1.0)


class RowDecoder(Generic[_Request, _Text, _Update]):
    """Decodes texts in R = `rows` rows of a batch; up to `entering` of them enter it together.

    A subclass implements `start`, `enter`, `results` and `take`.

    `shape_of(params, rows)` is the shape of the state, `more` is `sample_more` or `beam_more`. The
    rows are for `count` texts, at most `most`.
    """

    def __init__(
        self,
        model: DecodingModel,
        params: Any,
        count: int,
        most: int,
        shape_of: Callable[[Any, int], Any],
        more: Callable[..., Any],
    ) -> None:
        self.model, self.params, self.devices = model, params, strategy_of(params)
        parts = self.devices.mesh.shape["data"]
        self.rows: int = num_rows(count, most, parts)
        # Of texts that enter together each part reads as many.
        self.entering: int = max(1, self.rows // 8 // parts) * parts
        with only_on(self.devices):
            shapes = shape_of(params, self.rows)
        self.state: Any = empty_state(self.devices, self.rows, shapes)
        stop, n, ended = np.ones(self.rows, bool), np.int32(0), np.int32(0)
        self._more = self.compile(search_more, stop, n, ended, more=more)

    def compile(self, jitted: Any, *arrays: Any, **static: Any) -> Callable[..., Any]:
        """The piece `jitted` as a function of the state and `arrays`."""
        return compile_piece(
            self.devices, self.model, self.params, jitted, self.state, *arrays, **static
        )

    def start(self, request: _Request) -> _Text:
        """The text of a `request` before its first token."""
        raise NotImplementedError

    def count_together(self, texts: Sequence[_Text]) -> int:
        """How many of `texts`, from the first on, can enter together."""
        return len(texts)

    def enter(
        self, state: Any, rows: Int[np.ndarray, " K"], texts: Sequence[_Text]
    ) -> Iterator[Any]:
        """The states while up to K = `entering` texts are read into `rows`, piece by piece."""
        raise NotImplementedError

    def results(self, state: Any) -> Any:
        """The arrays [R, ...] of `state` that texts take their rows of."""
        raise NotImplementedError

    def take(self, text: _Text, row: Any, stopped: bool) -> _Update | None:
        """The part that a row of the `results` adds to its text; None: nothing yet."""
        raise NotImplementedError

    def _count_entering(self, waiting: Iterable[tuple[int, _Text]]) -> int:
        """The number of the texts that wait and enter next."""
        return self.count_together([text for _, text in itertools.islice(waiting, self.entering)])

    def decode(
        self, requests: Sequence[tuple[int, _Request]], pace: Pace
    ) -> Iterator[list[tuple[int, _Update]]]:
        """Decodes numbered requests to their ends; yields the updates of each piece.

        An update is paired with the number of its request. A text that has stopped before it is
        done enters again. The result of a text depends neither on its row nor on the time when it
        enters.
        """
        state = self.state
        waiting = deque((number, self.start(request)) for number, request in requests)
        active: dict[int, tuple[int, _Text]] = {}
        while waiting or active:
            while waiting:
                count = self._count_entering(waiting)
                if len(active) + count > self.rows:
                    break
                free = [row for row in range(self.rows) if row not in active][:count]
                new = [waiting.popleft() for _ in range(count)]
                # A number that is no row fills up.
                rows = np.full(self.entering, self.rows, np.int32)
                rows[:count] = free
                for after_piece in self.enter(state, rows, [text for _, text in new]):
                    state = jax.block_until_ready(after_piece)
                    yield []
                active.update(zip(free, new, strict=True))
            stop = np.array([row not in active for row in range(self.rows)])
            # The piece ends early once so many rows have stopped that the next texts can enter.
            enough = self.rows
            if waiting:
                enough = stop.sum() + self._count_entering(waiting)
            begun = time.monotonic()
            state = self._more(state, stop, np.int32(pace.tokens), np.int32(enough))
            stopped, results = self.devices.gather((state.stopped, self.results(state)))
            has_all_tokens = stopped.sum() < enough
            if has_all_tokens:
                pace = pace.after(time.monotonic() - begun)
            updates = []
            for row, (number, text) in sorted(active.items()):
                row_results = jax.tree.map(lambda x, row=row: x[row], results)
                update = self.take(text, row_results, stopped[row])
                if update is not None:
                    updates.append((number, update))
                if stopped[row] or text.done:
                    del active[row]
                if stopped[row] and not text.done:
                    waiting.appendleft((number, text))
            yield updates


Group = tuple[Sequence[tuple[int, _Request]], Callable[[int], RowDecoder[_Request, Any, _Update]]]
"""Numbered requests, and a function that makes the decoder of as many of them as it is given."""


def decode_parts(
    groups: Iterable[Group[_Request, _Update]], programs: int, pace: Pace
) -> Iterator[Iterator[list[tuple[int, _Update]]]]:
    """Iterators over the pieces of each group's requests, divided for `programs` at a time."""
    for requests, make_decoder in groups:
        parts = min(programs, len(requests))
        decoder = make_decoder(-(-len(requests) // parts))
        for part in range(parts):
            yield decoder.decode(requests[part::parts], pace)


def decode_all(
    groups: Iterable[Group[_Request, _Update]], programs: int, pace: Pace
) -> Iterator[tuple[int, _Update]]:
    """The updates of all requests, with their numbers; `programs` decode at a time, in threads."""
    for pieces in collect_concurrently(decode_parts(groups, programs, pace), programs):
        for updates in pieces:
            yield from updates


def num_rows(count: int, most: int, parts: int = 1) -> int:
    """The rows for `count` texts: 1, 4, 8, 16, 24, ... or `most`, in a multiple of `parts`.

    They are about as many as one of the equal parts of at most `most` texts has.
    """
    share = -(-count // -(-count // most))
    if share == 1:
        rows = 1
    elif share <= 6:
        rows = 4
    else:
        rows = -(-share // 8) * 8
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


def state_shapes(devices: Strategy, rows: int, begin: Callable[..., Any], params: Any) -> Any:
    """The state that `begin(params=params)` returns, as `jax.ShapeDtypeStruct` with shardings."""
    with only_on(devices):
        shapes = jax.eval_shape(lambda params: begin(params=params), params)
    return _with_shardings(devices, rows, shapes)


def _with_shardings(devices: Strategy, rows: int, shapes: Any) -> Any:
    """The `shapes` of a state with its shardings, where there are several devices."""
    if devices.mesh.size == 1:
        return shapes
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        shapes,
        shardings(devices, shapes, rows),
    )


def empty_state(devices: Strategy, rows: int, shapes: Any) -> Any:
    """A state of these `shapes` on `devices`: zeros, in rows that have stopped."""
    shapes = _with_shardings(devices, rows, shapes)

    def filled(numbers: Any) -> Any:
        state = jax.tree.map(lambda leaf: numbers.zeros(leaf.shape, leaf.dtype), shapes)
        return state.replace(stopped=numbers.ones(rows, bool))

    if devices.mesh.size == 1:
        return filled(np)
    # Each device makes its own part.
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.jit(lambda: filled(jnp), out_shardings=where)()
