"""The process of a command, before it loads JAX: open streams, and what must be installed."""

import importlib.util
import os
import sys


def open_closed_streams() -> None:
    """Opens the null device as each standard stream that the caller has closed.

    A file would get its number otherwise, and with it what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def check_environment() -> None:
    """Ends the process with one sentence where Python is too old, or where JAX is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 - a checkout runs without being installed
        sys.exit(f"error: Python is {sys.version.split()[0]}, but must be 3.11 or later")
    if importlib.util.find_spec("jax") is None:
        sys.exit(
            f"error: {sys.executable} has no jax: run `pip install -e '.[experiments]'` in the "
            "checkout, or use the python of the environment that has it (.venv/bin/python)"
        )
    if sys.stderr.isatty():
        print("loading JAX ...", file=sys.stderr, flush=True)
