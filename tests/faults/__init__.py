"""Injected faults, counted: `python -m tests.faults` in a minute, `--full` in under ten."""
