"""The processes of a run: they start, stop on a signal and end together; the first one writes."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from jaxformer import distributed
from jaxformer.config import Checked, Count, Natural, to_plain
from jaxformer.distributed import Termination
from jaxformer.errors import ConfigError

SIGNALS = tuple(
    number
    for number in signal.Signals
    if number.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # Windows has the first two
)
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


class ProcessChoice(Protocol):
    """The options of `ProcessOptions`, as a configuration of an experiment has them, too."""

    @property
    def asks_for_several(self) -> bool:
        """Whether several processes compute together."""
        ...

    @property
    def coordinator(self) -> str:
        """HOST:PORT of process 0, or empty."""
        ...

    @property
    def num_processes(self) -> int | None:
        """Number of processes."""
        ...

    @property
    def process_id(self) -> int | None:
        """Number of this process."""
        ...


@contextmanager
def joined(config: ProcessChoice) -> Iterator[Termination | None]:
    """Within it this process is one of the processes of `config`, and only the first prints.

    Enter it before anything touches a device, or when the processes have joined already; all leave
    it together. Yields what ends one of several on a signal: see `asked_to_stop`.

    Raises `ConfigError` as `jaxformer.distributed.initialize` does, and when the processes have
    different settings.
    """
    if not config.asks_for_several:
        yield None
        return
    if not jax.distributed.is_initialized():  # another run may have joined before, as of a sweep
        distributed.initialize(config.coordinator or None, config.num_processes, config.process_id)
    with contextlib.ExitStack() as stack:
        termination = stack.enter_context(_termination()) if _is_main_thread() else None
        check_same_settings(config)
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        with lost_process_explained():
            yield termination
        wait("end")  # a process that ends early would stop the runtime of the others


def check_same_settings(config: ProcessChoice) -> None:
    """Raises `ConfigError` in all processes where they have different settings."""
    settings = config_files.flat(to_plain(config))
    settings.pop("process_id")
    distributed.assert_processes_agree({"experiment": type(config).__name__} | settings)


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
def asked_to_stop(
    termination: Termination | None = None, is_saving: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], bool]]:
    """Within it, the first signal of `SIGNALS` only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with 128 plus
    the signal's number. A second SIGTERM or SIGINT ends the process at once (while XLA compiles, as
    soon as it has). SIGHUP and SIGUSR1 that are ignored at the start, as by nohup, stay so. The
    previous handlers are restored on leaving. Outside the main thread, which alone may have
    handlers, nothing asks.

    Among several processes, which give the `termination` of `joined`, it is enough that one gets a
    signal: the function returns True in all of them after the same step. One whose step does not
    end, because another process has not joined it, ends unless `is_saving()`.
    """
    noted: list[int] = []
    ending: list[int] = []
    with contextlib.ExitStack() as stack:
        if termination is not None:
            is_asked = stack.enter_context(termination.requests(is_saving))
        elif _is_main_thread():
            noted = stack.enter_context(_noted_signals())

        def stop() -> bool:
            asked = bool(noted) if termination is None else is_asked()
            if asked and not ending:
                first = noted[0] if termination is None else termination.number
                ending.append(first or signal.SIGTERM)  # None: another process was asked
                name = signal.Signals(ending[0]).name
                message = f"{name}: saving after the current step; once more to quit now"
                display.say(message, sys.stderr)
            return bool(ending)

        yield stop
    if ending or noted:
        raise SystemExit(128 + (ending or noted)[0])


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Within it, signals are added to the yielded list; a second SIGTERM or SIGINT is the end."""
    noted: list[int] = []
    close_terminal = _terminal_closer()

    def note(number: int, frame: object) -> None:
        if noted and number in _AT_ONCE:
            display.show_cursor()
            os._exit(128 + number)
        noted.append(number)
        close_terminal(number)

    before = {number: signal.getsignal(number) for number in _heard_signals()}
    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _termination() -> Termination:
    """The end of one of several processes on a signal."""
    return Termination(
        _heard_signals(),
        say=lambda message: display.say(message, sys.stderr),
        at_first=_terminal_closer(),
        at_end=display.show_cursor,
    )


def _heard_signals() -> list[signal.Signals]:
    """The requests to stop that this process hears.

    A shell ignores SIGINT for whatever it starts in the background: that one is heard.
    """
    return [
        number
        for number in SIGNALS
        if number in _AT_ONCE or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _terminal_closer() -> Callable[[int], None]:
    """A function of a signal that sends what is printed nowhere after SIGHUP.

    The terminal that this process was started at takes no more words then.
    """
    is_on_terminal = sys.stdout.isatty() or sys.stderr.isatty()

    def close(number: int) -> None:
        if is_on_terminal and signal.Signals(number).name == "SIGHUP":
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)

    return close


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
