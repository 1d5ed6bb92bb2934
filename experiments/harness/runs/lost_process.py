"""A process that dies while others go on: which one, and how the run goes on."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src.distributed import global_state  # the only way to the coordinator's store

_LOST_PROCESS = ("Gloo", "NCCL", "Socket closed", "coordination service")  # in XLA's errors
_SIGNS, _EVERY = "jaxformer/signs/", 2.0
"""The folder of the coordinator's store where each process counts on, every so many seconds."""
_SILENCE = 15.0  # seconds without a sign of life; JAX's runtime ends all after a minute
_RESUME = (
    "start the same command again on all hosts, or on another number of them: it resumes from the "
    "newest checkpoint"
)


@contextmanager
def explained(silent: Callable[[float], list[int]]) -> Iterator[None]:
    """Within it, a step that fails because another process is gone exits with code 1 and a message.

    `silent(seconds)` gives the processes without a sign of life for so long. If JAX's runtime
    notices first, it ends this process with code 134, and names the process.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # on CPUs a step itself raises
        if not any(word in str(error) for word in _LOST_PROCESS):
            raise
        time.sleep(3 * _EVERY)  # its last sign may have been read just now, _EVERY after it died
        gone = ", ".join(map(str, silent(1.5 * _EVERY)))
        raise SystemExit(
            f"another process has died{gone and f' (process {gone})'}, or its connection has: "
            f"{_RESUME} ({' '.join(str(error).split())})"
        ) from error


class _Signs(threading.Thread):
    """Each process counts on in the coordinator's store, and warns once of one that no longer does.

    With it a process says why it ends, also where JAX's runtime ends it.
    """

    def __init__(self) -> None:
        super().__init__(name="signs of life", daemon=True)
        self.ended = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}  # key -> its count, and since when

    def run(self) -> None:
        """Counts until `ended`, or until the coordinator is gone."""
        store: Any = global_state.client
        key, warned = f"{_SIGNS}{jax.process_index()}", False
        for number in itertools.count():
            try:
                store.key_value_set(key, str(number), allow_overwrite=True)
                signs = dict(store.key_value_dir_get(_SIGNS))
            except jax.errors.JaxRuntimeError:
                return
            now = time.monotonic()
            changed = {k: (v, now) for k, v in signs.items() if self._seen.get(k, ("",))[0] != v}
            self._seen |= changed
            silent = self.silent(_SILENCE)
            if silent and not warned:
                warned = True
                print(
                    f"process {', '.join(map(str, silent))} of this run has given no sign of life "
                    f"for {_SILENCE:g} s: if it has died, this process ends within a minute; then "
                    f"{_RESUME}",
                    file=sys.stderr,
                    flush=True,
                )
            if self.ended.wait(_EVERY):
                return

    def silent(self, seconds: float) -> list[int]:
        """The processes that have given no sign of life for so many seconds."""
        since = time.monotonic() - seconds
        keys = [key for key, (_, seen) in self._seen.items() if seen < since]
        return sorted(int(key.removeprefix(_SIGNS)) for key in keys)


@contextmanager
def signs_of_life() -> Iterator[_Signs]:
    """Within it this process gives signs of life."""
    signs = _Signs()
    signs.start()
    try:
        yield signs
    finally:
        signs.ended.set()
