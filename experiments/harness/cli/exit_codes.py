"""Exit codes of commands, and one sentence for what went wrong."""

import contextlib
import contextvars
import io
import os
import re
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from experiments.harness.cli import display
from experiments.harness.cli.gpu_memory import take_gpu_memory
from jaxformer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    MissingExtra,
    is_out_of_memory,
)

_TERMINATED = 128 + signal.SIGTERM
_STOPPED = {  # Windows has only the first
    128 + number: number.name
    for number in signal.Signals
    if number.name in ("SIGTERM", "SIGHUP", "SIGUSR1")
}
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ConfigError, 2),
    (MissingExtra, 2),
    (DataError, 65),
    (CheckpointError, 66),
    (Diverged, 70),
    (OSError, 74),
    (KeyboardInterrupt, 130),
)
_XLA_BRIDGE = "jax._src.xla_bridge"
"""The module of JAX that starts the devices."""
_DEVICE_CURE = (
    "on a machine with an NVIDIA GPU install the extra cuda13 (driver 580 or later) or cuda12 "
    "(525), on a TPU host requirements-tpu.txt"
)


_REMEDIES = (
    "Give fewer or shorter texts at once; where the command has them, a smaller --beam_size or "
    "--count, --int8, or a --mesh that divides the model over devices"
)


class OutOfMemory(RuntimeError):
    """A training found no memory; the message says how much, and the settings that need less."""


def run(main: Callable[[], None]) -> int:
    """The exit code of the process after `main()`; what went wrong is one sentence on stderr.

    A traceback stands before it for code 1 (but not where memory is short), and for an `OSError`
    that names no file. SIGTERM ends `main` with code 143. A reader that closes our standard output
    early, as `head` does, is no error. A command takes more of a GPU's memory than JAX does alone.
    """
    try:
        take_gpu_memory()
        _show_all_characters()
        with _terminable(), _without_closed_loops(), warnings.catch_warnings():
            warnings.showwarning = _warn  # one sentence, without the line of a program
            contextvars.copy_context().run(main)  # what a command trusts ends with it
            sys.stdout.flush()
        return 0
    except SystemExit as end:
        return _exit_status(end)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            return 0
        if isinstance(error, OSError) and not _names_a_file(error) and _is_output_full(error):
            error.filename = "standard output"
        code = exit_code(error)
        unnamed = isinstance(error, OSError) and not _names_a_file(error)
        is_short = isinstance(error, OutOfMemory) or is_out_of_memory(error)
        if unnamed or (code == 1 and not is_short):
            traceback.print_exc()
        print(f"error: {sentence(error)}", file=sys.stderr)
        return code


def _show_all_characters() -> None:
    """Lets an output of few characters, such as one in ASCII, show ? for others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def exit_code(error: BaseException) -> int:
    """0 to 143, by the class of `error`: see `_CODES`; 2 without a device; 1 for any other."""
    if _lacks_device(error):
        return 2
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)


def sentence(error: BaseException) -> str:
    """The message of `error`, on one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if is_out_of_memory(error):  # a training has remedies of its own
        return f"{memory_asked_for(error)}. {_REMEDIES}"
    if _lacks_device(error):
        asked = os.environ.get("JAX_PLATFORMS", "")
        return f"JAX finds no device for JAX_PLATFORMS={asked}: unset it, or {_DEVICE_CURE}"
    return " ".join(str(error).split("\n")) or type(error).__name__


def _names_a_file(error: OSError) -> bool:
    """Whether `error` has the name of a file, as the package's own errors have."""
    return error.filename is not None or _raised_in(error).startswith("jaxformer.")


def _is_output_closed() -> bool:
    """True if the reader of stdout is gone (`| head`); then /dev/null takes its place."""
    if not hasattr(select, "poll"):  # as on Windows
        return False
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        output, poll = sys.stdout.fileno(), select.poll()
        poll.register(output, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            _discard_output()
            return True
    return False


def _is_output_full(error: OSError) -> bool:
    """True if `error` comes from stdout, whose disk is full; then /dev/null takes its place."""
    try:
        sys.stdout.flush()
    except OSError as again:
        if again.errno == error.errno:
            _discard_output()
            return True
    return False


def _discard_output() -> None:
    """Puts /dev/null in place of stdout, which the interpreter flushes once more at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lacks_device(error: BaseException) -> bool:
    """Whether `error` comes from JAX as it starts the devices."""
    return _raised_in(error) == _XLA_BRIDGE


def _raised_in(error: BaseException) -> str:
    """The module that raised `error`; "" for one that was not raised."""
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1] if names else ""


def memory_asked_for(error: BaseException) -> str:
    """The memory that a program of JAX did not get, as its `error` says it."""
    asked = re.search(r"allocat\w* (\d[\d,]*(?:\.\d+)?) ?(\w+)", str(error))
    if not asked:
        return f"out of memory: {str(error).splitlines()[0]}"
    amount, unit = asked.groups()
    size = f"{amount} {unit}"
    num_bytes = float(amount.replace(",", ""))
    if unit == "bytes" and num_bytes >= 2**30:
        size = f"{num_bytes / 2**30:,.1f} GiB"
    return f"out of memory: {size} were asked for"


def _exit_status(end: SystemExit) -> int:
    if end.code in _STOPPED:
        print(f"stopped by {_STOPPED[end.code]}", file=sys.stderr)
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(f"error: {end.code}", file=sys.stderr)
    return 1


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    display.say(f"warning: {' '.join(str(message).split())}", sys.stderr)


@contextmanager
def _without_closed_loops() -> Iterator[None]:
    """Within it, threads of tensorstore do not print that they report to a loop that has ended.

    They do so for each array that is left of a checkpoint after its first one has failed, which is
    told once.
    """
    show = sys.unraisablehook

    def show_others(raised: Any) -> None:
        error = raised.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            show(raised)

    sys.unraisablehook = show_others
    try:
        yield
    finally:
        sys.unraisablehook = show


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that files are closed; training sets its own handler.

    One of several processes leaves the signal to JAX, which tells the others of it: also after the
    command, and in a second command of this process.
    """
    if threading.current_thread() is not threading.main_thread() or _jax_hears_signals():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        if not _jax_hears_signals():
            signal.signal(signal.SIGTERM, previous)


def _jax_hears_signals() -> bool:
    """Whether this process has joined others, for which JAX handles SIGTERM."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
