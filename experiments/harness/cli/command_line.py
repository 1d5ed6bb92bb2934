"""The command line: options over presets, and what an exit code says about an error."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from experiments.harness.cli import config_files
from experiments.harness.cli.option_hints import did_you_mean, suggestion
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

T = TypeVar("T")

_TERMINATED = 128 + signal.SIGTERM
_CODES = (
    ("jaxformer.errors", "ConfigError", 2),
    ("jaxformer.errors", "MissingExtra", 2),
    ("jaxformer.errors", "DataError", 65),
    ("jaxformer.errors", "CheckpointError", 66),
    ("jaxformer.errors", "Diverged", 70),
    ("builtins", "OSError", 74),
    ("builtins", "KeyboardInterrupt", 130),
)


def parse(
    presets: Mapping[str, T],
    args: list[str] | None = None,
    description: str | None = None,
    *,
    experiment: str = "",
    positional: str = "",
) -> T:
    """Returns the preset named by `--preset` (the first by default), changed by the options.

    `presets` holds frozen dataclasses. A nested field is set by its dotted name, as in
    `--model.d_model 256`; a field of type bool is a flag, `--int8` or `--no_int8`. Below the
    options, `--config PATH` changes fields by a JSON or TOML file, or a run's folder. With
    `experiment`, `--resume RUN` takes the settings of a run in a folder of that name, and
    `--continue_from RUN` too, for a new run that goes on from its state. First arguments without a
    name are those of the option `positional`. A list that is given several times has all values.
    `args` are those of the process when None. An unknown preset, an unknown option, and settings
    that contradict each other end the process with code 2 and one sentence on stderr. Raises
    `MissingExtra` when tyro is not installed.
    """
    tyro = optional_dependencies.load("tyro")
    args = sys.argv[1:] if args is None else args
    if positional and args and not args[0].startswith("-"):
        args = [f"--{positional}", *args]
    known = ["--preset", "--config"]
    known += ["--resume", "--continue_from"] if experiment else []
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in known:
        finder.add_argument(*{name, name.replace("_", "-")}, dest=name.removeprefix("--"))
    found, rest = finder.parse_known_args(args)
    try:
        preset = _with_files(presets, vars(found), experiment)
    except ConfigError as error:
        _refuse(sentence(error))
    options = _options(preset, "--")
    rest = _join_repeated(rest, _lists(preset))
    _refuse_unknown_options(rest, [*known, *options])
    _refuse_values_of_flags(rest, options)
    if {"-h", "--help"} & set(rest):
        print(_wrapped((description or "") + _about_presets(presets, found.preset, experiment)))
    with _refused_in_one_sentence():
        return tyro.cli(
            type(preset),
            prog=_program(),
            default=preset,
            args=rest,
            description="",
            use_underscores=True,
            config=(tyro.conf.AvoidSubcommands,),
        )


def _with_files(presets: Mapping[str, T], given: dict[str, str | None], experiment: str) -> T:
    """The preset with the fields of the files that --config, --resume and --continue_from name."""
    resume, parent = given.get("resume"), given.get("continue_from")
    if resume and (given["config"] or given["preset"] or parent):
        raise ConfigError(
            "--resume takes all settings of the run: leave out --config, --preset and "
            "--continue_from"
        )
    run = resume
    if parent and not (given["config"] or given["preset"]):
        run = str(config_files.split_step(parent)[0])
    path = run or given["config"]
    fields = config_files.read_object(Path(path)) if path else {}
    named = fields.pop("preset", None)
    name = given["preset"] or named or next(iter(presets))
    if name not in presets:
        hint = did_you_mean(difflib.get_close_matches(str(name), presets))
        raise ConfigError(f"there is no preset {name!r}: {hint}choose one of {', '.join(presets)}")
    preset: Any = presets[name]
    if path:
        of_run = Path(path).is_dir() or Path(path).name == "config.json"
        complete = of_run and not (given["preset"] or named)
        preset = config_files.with_fields(preset, fields, Path(path), complete=complete)
    if run:
        preset = dataclasses.replace(preset, **_place(run, experiment))
    if not parent:
        return preset
    name = f"{preset.name}-continued" if run else preset.name
    return dataclasses.replace(preset, name=name, continue_from=parent, init_from="")


def _place(path: str, experiment: str) -> dict[str, str]:
    """The options `name` and `runs` of the run in the folder `path`."""
    folder = Path(os.path.abspath(path))
    if folder.parent.name != experiment:
        raise ConfigError(
            f"{path} is not a run of {experiment}: it is not in a folder {experiment}/"
        )
    root = folder.parent.parent
    return {
        "name": folder.name,
        "runs": str(root) if os.path.isabs(path) else os.path.relpath(root),
    }


def _about_presets(presets: Mapping[str, Any], chosen: str | None, experiment: str) -> str:
    default, text = next(iter(presets)), ""
    if len(presets) > 1:
        text += f"\n\n--preset NAME chooses the defaults: {', '.join(presets)}. Without it NAME is "
        text += f"{default}. The defaults shown here are those of {chosen or default}."
    text += "\n\n--config PATH takes settings from a .json or .toml file"
    text += ", or from a run's folder" if len(presets) > 1 else ""
    text += "; options on the command line come on top."
    if experiment:
        text += "\n\n--resume RUN takes all settings of the run in the folder RUN. --continue_from "
        text += "RUN does so for a new run, which takes over its state."
    return text


def start(
    main: Callable[[T], None], presets: Mapping[str, T], description: str | None, **parsing: str
) -> NoReturn:
    """Ends the process after `main` of what `parse` returns, with the exit code of `run`."""
    sys.exit(run(lambda: main(parse(presets, None, description, **parsing))))


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
    module = sys.modules.get("jaxformer.distributed.compiled_step")
    return module is not None and module.is_out_of_memory(error)


def _advice(error: BaseException) -> str:
    """How much memory was asked for, what holds the rest, and which settings lower the need."""
    asked = re.search(r"allocat\w* ([\d.,]+ ?\w+)", str(error))
    reasons = [f"{asked[1]} were asked for" if asked else str(error).splitlines()[0]]
    reasons += filter(None, getattr(error, "__notes__", []))
    return (
        f"out of memory: {'; '.join(reasons)}. Lower the batch "
        "(--data.batch_size or --data.batch_tokens), raise --training.grad_accumulation, or give "
        "--training.remat blocks; the command plan says what a choice needs"
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


def _wrapped(text: str) -> str:
    """The paragraphs of `text` in the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    paragraphs = text.strip().split("\n\n")
    return "".join(textwrap.fill(paragraph.strip(), width) + "\n\n" for paragraph in paragraphs)[
        :-1
    ]


def _options(config: Any, prefix: str) -> dict[str, str]:
    """The options of the dataclass `config`, each with its opposite, "" where it is no flag."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        on, off = prefix + field.name, f"{prefix}no_{field.name}"
        if dataclasses.is_dataclass(value):
            found |= _options(value, f"{on}.")
        else:
            found |= {on: off, off: on} if isinstance(value, bool) else {on: ""}
    return found


def _lists(config: Any) -> list[str]:
    """The options of the dataclass `config` that take several values."""
    texts = config_files.flat(config_files.plain(config))
    return [f"--{name}" for name, text in texts.items() if text.startswith("[")]


def _join_repeated(args: list[str], lists: list[str]) -> list[str]:
    """`args` with the values of each of the options `lists` behind one another, at the end."""
    kept: list[str] = []
    found: dict[str, list[str]] = {}
    target = kept
    for arg in args:
        name, equals, value = arg.partition("=")
        if not arg.startswith("--"):
            target.append(arg)
        elif _canonical(name) in lists:
            target = found.setdefault(_canonical(name), [])
            target += [value] if equals else []
        else:
            target = kept
            target.append(arg)
    return [*kept, *(word for name, values in found.items() for word in (name, *values))]


def _refuse_unknown_options(args: list[str], known: list[str]) -> None:
    for arg in args:
        name = arg.partition("=")[0]
        if name.startswith("--") and _canonical(name) not in (*known, "--help", "--"):
            _refuse(f"there is no option {name}: {suggestion(_canonical(name), known)}")


def _refuse_values_of_flags(args: list[str], options: Mapping[str, str]) -> None:
    for arg, following in itertools.pairwise([*args, ""]):
        name, equals, value = arg.partition("=")
        opposite = options.get(_canonical(name))
        if opposite and (equals or following.lower() in ("true", "false")):
            _refuse(f"{name} is a flag and takes no value: write {name} or {opposite} alone")


def _canonical(name: str) -> str:
    return "--" + name.removeprefix("--").replace("-", "_")


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
        if end.code:
            _refuse(_first_section(said.getvalue()))
        raise


def _first_section(text: str) -> str:
    """The reason in what tyro prints: without colours, frame and what follows, on one line."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # on a terminal
    lines = [line.strip("╭─╮│╰╯|+- ") for line in text.splitlines()]
    further = ("For full helptext", "Argument helptext")
    reason = itertools.takewhile(lambda line: not line.startswith(further), lines)
    return " ".join([line for line in reason if line][1:])


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


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
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
