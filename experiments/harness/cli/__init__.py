"""Command line: presets, configuration files, options, exit codes, values by name."""

from experiments.harness.cli.command_line import (
    exit_code,
    parse,
    run,
    say,
    sentence,
    start,
)
from experiments.harness.cli.config_files import with_options

__all__ = ["exit_code", "parse", "run", "say", "sentence", "start", "with_options"]
