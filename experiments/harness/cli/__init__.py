"""Command line: presets, configuration files, options, exit codes, the screen.

`start` runs a command: `parse` makes a configuration of presets, files and options, `run` an exit
code of an error. `config_files` reads configurations from files and words, `display` shows what a
command does, `own_command` is how it was started.
"""

from experiments.harness.cli import config_files, display
from experiments.harness.cli.command_line import (
    own_command,
    parse,
    read_option,
    start,
    take_options,
)
from experiments.harness.cli.exit_codes import exit_code, run, sentence

__all__ = [
    "config_files",
    "display",
    "exit_code",
    "own_command",
    "parse",
    "read_option",
    "run",
    "sentence",
    "start",
    "take_options",
]
