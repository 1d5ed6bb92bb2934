"""Command line: presets, configuration files, options, exit codes, values by name, the screen.

`start` runs a command: `parse` makes a configuration of presets, files and options, `run` an exit
code of an error. `config_files` turns configurations into JSON and back, `import_by_name` finds a
user's functions, `display` shows what a command does, `own_command` is how it was started.
"""

from experiments.harness.cli import config_files, display
from experiments.harness.cli.command_line import own_command, parse, start
from experiments.harness.cli.config_files import (
    import_by_name,
    is_import_name,
    name_of,
    with_options,
)
from experiments.harness.cli.exit_codes import exit_code, run, say, sentence

__all__ = [
    "config_files",
    "display",
    "exit_code",
    "import_by_name",
    "is_import_name",
    "name_of",
    "own_command",
    "parse",
    "run",
    "say",
    "sentence",
    "start",
    "with_options",
]
