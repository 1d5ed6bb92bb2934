"""Tokens from a compiled program while it is still running, and the text they make."""

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int

from jaxformer.text.tokenizers import Tokenizer

TokenCallback = Callable[[Int[np.ndarray, " B"]], tuple[list[Any], Bool[np.ndarray, " B"]]]
"""callback(tokens [B]) -> (items to yield, stop [B]); runs on the host, for each token in turn."""

# A program waits for the host while it reports, so it reports several tokens at a time: as many as
# it writes in this many seconds.
_SECONDS = 0.05
_MOST_TOKENS = 16

# One compiled program serves all streams: each run gets the number of its own callback.
_CALLBACKS: dict[int, Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {}
_NUMBERS = itertools.count()


def report_tokens(
    number: Int[Array, ""] | np.integer, length: Int[Array, ""], tokens: Int[Array, "B L"]
) -> tuple[Bool[Array, " B"], Int[Array, ""]]:
    """The `StopFn` that calls callback `number` on the host."""
    size = min(_MOST_TOKENS, tokens.shape[1])
    start = jnp.maximum(length - size, 0)
    newest = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)
    answer = (jax.ShapeDtypeStruct(tokens.shape[:1], bool), jax.ShapeDtypeStruct((), np.int32))
    # Not `ordered`: each answer decides whether there is a next token, so the calls are in order.
    return io_callback(_call, answer, number, length, newest)


def run_streaming(
    program: Callable[[int], Any], callback: TokenCallback
) -> Generator[Any, None, Any]:
    """Yields the items of `callback` while `program` runs; returns what `program` returns.

    `program(number)` runs in a thread and calls `report_tokens(number, ...)`. It does not report
    the last tokens: they are in its result. If the generator is closed, or the callback or the
    program fails, the program stops at its next report and the thread ends.
    """
    items: SimpleQueue[Any] = SimpleQueue()
    closed, failed = threading.Event(), []
    reported, last_call = 0, time.monotonic()

    def on_tokens(length, newest):
        nonlocal reported, last_call
        start, stop = max(length - newest.shape[1], 0), np.ones(len(newest), bool)
        seconds = (time.monotonic() - last_call) / (length - reported)
        # An error raised here would end the program too, but XLA would print a report of it.
        if not closed.is_set():
            try:
                for tokens in newest[:, reported - start : length - start].T:
                    new, stop = callback(tokens)
                    for item in new:
                        items.put((item,))
            except BaseException as error:
                failed.append(error)
                stop = np.ones(len(newest), bool)
        reported, last_call = length, time.monotonic()
        count = max(1, min(newest.shape[1], int(_SECONDS / max(seconds, 1e-9))))
        return stop, np.asarray(length + count, np.int32)

    with _registered(on_tokens) as number, ThreadPoolExecutor(1) as pool:
        future = pool.submit(program, number)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item[0]
        finally:
            closed.set()
    if failed:
        raise failed[0]
    return future.result()


@contextmanager
def _registered(
    callback: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Iterator[int]:
    number = next(_NUMBERS)
    _CALLBACKS[number] = callback
    try:
        yield number
    finally:
        del _CALLBACKS[number]


def _call(number: Any, length: Any, newest: Any) -> tuple[np.ndarray, np.ndarray]:
    return _CALLBACKS[int(number)](int(length), np.asarray(newest))


# Tokenizers decode bytes that are no character to this, such as the first bytes of a character.
_NO_CHARACTER = "\ufffd"
# How many tokens before the first new one are decoded with it: they decide about its space.
_BEFORE = 8


class PartialText:
    """The continuation of a prompt: up to `max_new_tokens` ids, an id of `eos` or a `stop` string.

    `ids` are those so far, with their `log_probs`; `text` is the text that no later id changes,
    without the stop string. `ended`: whether EOS or a stop string is reached. `done`: whether it
    has ended or is as long as it may be.
    """

    def __init__(
        self,
        example_id: int,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int,
        eos: tuple[int, ...],
        stop: tuple[str, ...],
    ) -> None:
        self.example_id = example_id
        self.prompt: list[int] = list(prompt)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.text: str = ""
        self.ended: bool = False
        self.done: bool = False
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self.eos = eos
        self._stop = stop
        self._known = self.prompt[-_BEFORE:]
        self._before = tokenizer.decode(self._known)
        self._unread: list[int] = []
        self._held = ""

    @property
    def left(self) -> int:
        """The number of ids that may follow."""
        return 0 if self.done else self._max_new_tokens - len(self.ids)

    def context(self, size: int) -> list[int]:
        """The last `size` ids of the prompt and its continuation."""
        return (self.prompt + self.ids)[-size:]

    def add(self, token: int) -> str:
        """The new text after `token`; never half a character.

        A character whose last bytes never come is left out, as is what follows a stop string.
        """
        self.ids.append(token)
        self.ended = token in self.eos
        self.done = self.ended or len(self.ids) == self._max_new_tokens
        if not self.ended:
            self._unread.append(token)
        self._held += self._read()
        piece = self._release()
        self.text += piece
        return piece

    def _read(self) -> str:
        """The text of the unread ids, or nothing while it ends in the middle of a character."""
        whole = self._tokenizer.decode(self._known + self._unread)
        if self.done:
            whole = whole.rstrip(_NO_CHARACTER)
        new = whole[len(self._before) :]
        if not new or new.endswith(_NO_CHARACTER):
            return ""
        self._known, self._unread = self._unread, []
        self._before = self._tokenizer.decode(self._known)
        return new

    def _release(self) -> str:
        """The text held back, without an end of it that may be the beginning of a stop string."""
        ends = [
            (self._held.find(stop) + len(stop), stop) for stop in self._stop if stop in self._held
        ]
        if ends:
            # The stop string that was complete first, and of several the longest.
            at, stop = min(ends, key=lambda each: (each[0], -len(each[1])))
            self.ended = self.done = True
            return self._held[: at - len(stop)]
        kept = 0 if self.done else self._stop_prefix()
        piece = self._held[: len(self._held) - kept]
        self._held = self._held[len(piece) :]
        return piece

    def _stop_prefix(self) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        ends = (size for size in sizes if self._begins_stop(self._held[-size:]))
        return next(ends, 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
