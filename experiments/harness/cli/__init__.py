"""Command line: presets, configuration files, options, exit codes, values by name."""

from experiments.harness.cli.command_line import (
    exit_code,
    parse,
    run,
    say,
    sentence,
    start,
)

__all__ = ["exit_code", "parse", "run", "say", "sentence", "start"]
