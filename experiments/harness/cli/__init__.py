"""The command line: options over presets and configuration files.

`start` runs a command: `parse` makes a configuration of presets, files and options and refuses
options without effect (`option_effects`), `run` makes an exit code of an error. `config_files`
reads configurations from files and words, `display` shows what a command does, `own_command` is how
it was started.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from experiments.harness.cli import config_files, display
from experiments.harness.cli.exit_codes import (
    OutOfMemory,
    exit_code,
    memory_asked_for,
    run,
    sentence,
)
from experiments.harness.cli.gpu_memory import GPU_MEMORY_SHARE
from experiments.harness.cli.option_effects import refuse_without_effect_in_all
from experiments.harness.cli.parsing import parse, parse_base, read_option, take_options

T = TypeVar("T")

__all__ = [
    "GPU_MEMORY_SHARE",
    "OutOfMemory",
    "config_files",
    "display",
    "exit_code",
    "memory_asked_for",
    "own_command",
    "parse",
    "parse_base",
    "read_option",
    "refuse_without_effect_in_all",
    "run",
    "sentence",
    "start",
    "take_options",
]


def start(
    main: Callable[[T], None],
    presets: Mapping[str, T],
    description: str | None,
    *,
    experiment: str = "",
    positional: str = "",
) -> NoReturn:
    """Ends the process after `main` of what `parse` returns, with the exit code of `run`."""

    def parse_and_run() -> None:
        main(parse(presets, None, description, experiment=experiment, positional=positional))

    sys.exit(run(parse_and_run))


def own_command() -> str:
    """The command of this process, without this machine's path of Python: another repeats it."""
    return shlex.join(["python", *sys.orig_argv[1:]])
