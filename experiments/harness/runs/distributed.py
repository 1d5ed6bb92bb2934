"""The processes of a run: they start, stop on a signal and end together; the first one writes."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from jaxformer import distributed
from jaxformer.config import Checked, Count, Natural, to_plain
from jaxformer.errors import ConfigError

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
"""Requests to stop: of the system, the keyboard, a terminal that closes, and a job's time limit."""
_AT_ONCE = signal.SIGTERM, signal.SIGINT
_LOST_PROCESS = ("Gloo", "NCCL", "Socket closed", "coordination service")
"""Words of XLA's errors where another process is gone."""


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Checked):
    """The processes that compute a command together."""

    rare_options: ClassVar = ("distributed", "coordinator", "num_processes", "process_id")
    """The options that --help shows last."""
    distributed: bool = False
    """Joins the processes that the cluster (SLURM, Cloud TPU, ...) has started."""
    coordinator: str = ""
    """HOST:PORT of process 0, where no cluster provides it; empty: none."""
    num_processes: Count | None = None
    """Number of processes, given with --coordinator only."""
    process_id: Natural | None = None
    """Number of this process, from 0, given with --coordinator only."""

    def __post_init__(self):
        super().__post_init__()
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
    settings = config_files.flat(to_plain(config))
    settings.pop("process_id")
    kind = {"experiment": type(config).__name__, "count of settings": len(settings)}
    distributed.assert_processes_agree(kind)
    distributed.assert_processes_agree(settings)
    with contextlib.ExitStack() as stack:
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        with lost_process_explained():
            yield
        wait("end")  # a process that ends early would stop the runtime of the others


@contextmanager
def lost_process_explained() -> Iterator[None]:
    """Within it, a step that fails because another process is gone exits with code 1 and a message.

    If JAX's runtime notices first, after a minute without a heartbeat, it ends this process with
    code 134, and names the process.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # on CPUs a step itself raises
        if not any(word in str(error) for word in _LOST_PROCESS):
            raise
        raise SystemExit(
            "another process has died, or its connection has: start the same command again on all "
            "hosts, or on another number of them: it resumes from the newest checkpoint "
            f"({' '.join(str(error).split())})"
        ) from error


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


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within it, the first signal of `SIGNALS` only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with 128 plus
    the signal's number. A second SIGTERM or SIGINT ends the process at once (while XLA compiles, as
    soon as it has). Of several processes it is enough that one gets a signal: JAX's runtime passes
    SIGTERM on, and the function returns True in all of them after the same step; only SIGINT counts
    as a second signal. SIGHUP and SIGUSR1 that are ignored at the start, as by nohup, stay so. The
    previous handlers are restored on leaving. Outside the main thread, which alone may have
    handlers, nothing asks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []
    ending: list[int] = []
    calls, several = count(1), is_several()
    is_on_terminal = sys.stdout.isatty() or sys.stderr.isatty()

    def note(number: int, frame: object) -> None:
        if asked and number in _AT_ONCE:
            display.show_cursor()
            os._exit(128 + number)
        asked.append(number)
        if number == signal.SIGHUP and is_on_terminal:  # which takes no more words
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
        if several and len(asked) == 1:
            signal.raise_signal(signal.SIGTERM)

    def stop() -> bool:
        # JAX agrees in the background on a step that no process has passed: a call costs no message
        is_asked = (
            multihost_utils.reached_preemption_sync_point(next(calls)) if several else bool(asked)
        )
        if is_asked and not ending:
            ending.extend(asked[:1] or [signal.SIGTERM])
            name = signal.Signals(ending[0]).name
            display.say(f"{name}: saving after the current step; once more to quit now", sys.stderr)
        return bool(ending)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        is_ours = number != signal.SIGTERM if several else True  # that one is JAX's
        # A shell ignores SIGINT for whatever it starts in the background: that one is heard.
        if is_ours and (number in _AT_ONCE or handler is not signal.SIG_IGN):
            signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ending or (asked and not several):
        raise SystemExit(128 + (ending or asked)[0])
