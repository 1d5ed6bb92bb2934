"""Command line: presets, configuration files, options, exit codes, values by name, the screen."""

from experiments.harness.cli.command_line import parse, start
from experiments.harness.cli.exit_codes import exit_code, run, say, sentence
from experiments.harness.cli.named_values import import_by_name, is_import_name, name_of

__all__ = [
    "exit_code",
    "import_by_name",
    "is_import_name",
    "name_of",
    "parse",
    "run",
    "say",
    "sentence",
    "start",
]
