"""A run of several processes: they start, fail and end together, and the first one writes."""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax._src.distributed import global_state  # the only way to the coordinator's store
from jax.experimental import multihost_utils

from experiments.harness import cli
from experiments.harness.cli import config_files
from jaxformer import distributed
from jaxformer.errors import ConfigError

_LOST_PROCESS = ("Gloo", "NCCL", "Socket closed", "coordination service")  # in XLA's errors
_SIGNS, _EVERY = "jaxformer/signs/", 2.0
"""The folder of the coordinator's store where each process counts on, every so many seconds."""
_SILENCE = 15.0  # seconds without a sign of life; JAX's runtime ends all after a minute
_RESUME = (
    "start the same command again on all hosts, or on another number of them: it resumes from the "
    "newest checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes that compute a command together."""

    rare_options: ClassVar = ("distributed", "coordinator", "num_processes", "process_id")
    """The options that --help shows last."""
    distributed: bool = False
    """Joins the processes that the cluster (SLURM, Cloud TPU, ...) has started."""
    coordinator: str = ""
    """HOST:PORT of process 0, where no cluster provides it; empty: none."""
    num_processes: int | None = None
    """Number of processes, given with --coordinator only."""
    process_id: int | None = None
    """Number of this process, from 0, given with --coordinator only."""

    def __post_init__(self):
        if self.distributed and self._is_placed:
            raise ConfigError(
                "distributed=True reads coordinator, num_processes and process_id from the "
                f"cluster, but coordinator={self.coordinator!r}, num_processes="
                f"{self.num_processes} and process_id={self.process_id} were given: give one or "
                "the other"
            )

    @property
    def asks_for_several(self) -> bool:
        """Whether the command is computed by several processes."""
        return self.distributed or self._is_placed

    @property
    def _is_placed(self) -> bool:
        return bool(self.coordinator) or (self.num_processes, self.process_id) != (None, None)


def joins(main: Callable[[Any], None]) -> Callable[[Any], None]:
    """The command `main` within `joined` of its options."""

    def joined_main(options: Any) -> None:
        with joined(options):
            main(options)

    return joined_main


@contextmanager
def joined(config: ProcessOptions) -> Iterator[None]:
    """Within it this process is one of those that `config` asks for, and only the first prints.

    Enter it before anything touches a device, or when the processes have joined already; all leave
    it together. Raises `ConfigError` as `jaxformer.distributed.initialize` does, and when the
    processes have different settings.
    """
    if not config.asks_for_several:
        yield
        return
    if not jax.distributed.is_initialized():  # another run may have joined before, as of a sweep
        distributed.initialize(config.coordinator or None, config.num_processes, config.process_id)
    settings = config_files.flat(config_files.plain(config))
    settings.pop("process_id")
    kind = {"experiment": type(config).__name__, "count of settings": len(settings)}
    distributed.assert_processes_agree(kind)
    distributed.assert_processes_agree(settings)
    with contextlib.ExitStack() as stack:
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        signs = stack.enter_context(_signs_of_life())
        with explain_lost_process(signs.silent):
            yield
        wait("end")  # a process that ends early would stop the runtime of the others


@contextmanager
def explain_lost_process(silent: Callable[[float], list[int]]) -> Iterator[None]:
    """Within it, a step that fails because another process is gone exits with code 1 and a message.

    `silent(seconds)` gives the processes without a sign of life for so long. If JAX's runtime
    notices first, it ends this process with code 134, and names the process.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(word in str(error) for word in _LOST_PROCESS):
            raise
        time.sleep(2 * _EVERY)
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
def _signs_of_life() -> Iterator[_Signs]:
    """Within it this process gives signs of life."""
    signs = _Signs()
    signs.start()
    try:
        yield signs
    finally:
        signs.ended.set()


def is_several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not is_several() or jax.process_index() == 0


def wait(name: str) -> None:
    """Returns when all processes have called it."""
    if is_several():
        multihost_utils.sync_global_devices(name)


@contextmanager
def together() -> Iterator[None]:
    """All processes leave the block together; where one fails, all exit with its code."""
    if not is_several():
        yield
        return
    code = 0
    try:
        yield
    except BaseException as error:
        code = cli.exit_code(error)
        raise
    finally:
        codes = multihost_utils.process_allgather(np.int32(code))
    failed = np.flatnonzero(codes)
    if failed.size:
        print(f"error: process {failed[0]} has failed: see its message", file=sys.stderr)
        raise SystemExit(int(codes[failed[0]]))


def agreed(number: float) -> float:
    """The `number` of the first process."""
    if not is_several():
        return number
    words = np.frombuffer(np.float64(number).tobytes(), np.uint32)
    return float(multihost_utils.broadcast_one_to_all(words).view(np.float64)[0])


def everywhere(fact: bool) -> bool:
    """Whether `fact` is true in all processes."""
    return not is_several() or bool(np.all(multihost_utils.process_allgather(np.bool_(fact))))
