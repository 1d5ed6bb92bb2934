"""The command line: options over presets, and what an exit code says about an error."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any, NoReturn, TextIO, TypeVar

from jaxformer import extras
from jaxformer.config import ConfigError

T = TypeVar("T")

_TERMINATED = 128 + signal.SIGTERM
_CODES = (
    ("jaxformer.config", "ConfigError", 2),
    ("jaxformer.extras", "MissingExtra", 2),
    ("jaxformer.data", "DataError", 65),
    ("jaxformer.checkpoint", "CheckpointError", 66),
    ("jaxformer.training", "Diverged", 70),
    ("builtins", "OSError", 74),
    ("builtins", "KeyboardInterrupt", 130),
)


def parse(presets: Mapping[str, T], args: list[str] | None = None, description: str = "") -> T:
    """The preset named by `--preset` (the first by default), with the other options over it.

    `presets` holds frozen dataclasses; a nested field is set by its dotted name, as in
    `--model.d_model 256`. `args` are those of the process when None. Exits with code 2, after one
    sentence on stderr, on an unknown preset or option or settings that contradict each other;
    `MissingExtra` when tyro is not installed.
    """
    tyro = extras.load("tyro")
    default = next(iter(presets))
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--preset", default=default)
    found, rest = finder.parse_known_args(args)
    names = ", ".join(presets)
    if found.preset not in presets:
        hint = _hint(difflib.get_close_matches(found.preset, presets))
        _refuse(f"there is no preset {found.preset!r}: {hint}choose one of {names}")
    preset = presets[found.preset]
    _refuse_unknown_options(rest, ["--preset", *_options(preset, "--")])
    with _refused_in_one_sentence():
        return tyro.cli(
            type(preset),
            prog=_program(),
            default=preset,
            args=rest,
            description=f"{description}\n\n--preset NAME starts from one of: {names} (now "
            f"{found.preset}, by default {default}); the defaults below are its own.".strip(),
            use_underscores=True,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )


def run(main: Callable[[], None]) -> int:
    """The exit code of the process after `main()`; what went wrong is one sentence on stderr.

    Only code 1, a bug or no memory left, brings a traceback. SIGTERM ends `main` with code 143.
    A reader that closes our output early, as `head` does, is no error.
    """
    try:
        with _terminable(), _plain_warnings():
            main()
            sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # the interpreter flushes once more at exit, and must not meet the closed pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        return _exit_status(end)
    except BaseException as error:
        code = exit_code(error)
        if code == 1:
            traceback.print_exc()
        print(f"error: {sentence(error)}", file=sys.stderr)
        return code


def exit_code(error: BaseException) -> int:
    """0 to 143, by the class of `error`: see `_CODES`; 1 for any other."""
    for module, name, code in _CODES:
        # an error of a module that was never imported cannot have been raised
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return 1


def sentence(error: BaseException) -> str:
    """What `error` says, on one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if _is_out_of_memory(error):
        return _advice(error)
    return " ".join(str(error).split("\n")) or type(error).__name__


def _is_out_of_memory(error: BaseException) -> bool:
    # a process that never computed on a device has not loaded this
    memory = sys.modules.get("jaxformer.parallel.memory")
    return memory is not None and memory.is_out_of_memory(error)


def _advice(error: BaseException) -> str:
    """How much memory was asked for, what holds the rest, and which settings lower the need."""
    asked = re.search(r"allocat\w* ([\d.,]+ ?\w+)", str(error))
    facts = [f"{asked[1]} were asked for" if asked else str(error).splitlines()[0]]
    facts += filter(None, getattr(error, "__notes__", []))
    return (
        f"out of memory: {'; '.join(facts)}. Lower the batch (--data.rows or --data.tokens), raise "
        "--training.accumulation, or give --training.remat blocks; the command plan says what a "
        "choice needs"
    )


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints `text`; a log on a full disk must not stop a training."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stdout, flush=True)


def _program() -> str | None:
    """The command as it was typed, when Python was started with -m."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec is not None else None


def _refuse(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)


def _hint(near: list[str]) -> str:
    return f"did you mean {' or '.join(near)}? " if near else ""


def _options(config: Any, prefix: str) -> list[str]:
    """The options that set the fields of the dataclass `config`, such as --model.d_model."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        name = prefix + field.name
        names += _options(value, f"{name}.") if nested else [name]
    return names


def _refuse_unknown_options(args: list[str], known: list[str]) -> None:
    for arg in args:
        name = arg.partition("=")[0]
        plain = "--" + name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and plain not in (*known, "--help", "--"):
            hint = _hint(_near_options(plain, known))
            _refuse(f"there is no option {name}: {hint}--help lists them all")


def _near_options(name: str, known: list[str]) -> list[str]:
    """Up to three of `known` whose last word is near that of `name`, nearest first."""
    last = {option: option.removeprefix("--").rpartition(".")[2] for option in known}
    word = name.removeprefix("--").rpartition(".")[2]
    near = difflib.get_close_matches(word, dict.fromkeys(last.values()))
    return [option for found in near for option in known if last[option] == found][:3]


@contextmanager
def _refused_in_one_sentence() -> Iterator[None]:
    """Says why settings were refused, without the frame that tyro draws around it."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as end:
        cause = end.__context__
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__context__
        if cause is not None:
            _refuse(sentence(cause))
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def _exit_status(end: SystemExit) -> int:
    if end.code == _TERMINATED:
        print("stopped by SIGTERM", file=sys.stderr)
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(f"error: {end.code}", file=sys.stderr)
    return 1


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Says a warning as one sentence, without the line of the program it comes from."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        yield


def _warn(message: Warning | str, *_: object) -> None:
    say(f"warning: {' '.join(str(message).split())}", sys.stderr)


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that files are closed; training puts its own in place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(_TERMINATED)
