"""Commands that train, measure and show models: `python -m experiments.EXPERIMENT.COMMAND`."""

import importlib.util
import os
import sys

for _number, _name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, _name) is None:  # closed by the caller: no file may get its number
        os.dup2(os.open(os.devnull, os.O_RDWR), _number)
        setattr(sys, _name, open(_number, "w" if _number else "r", closefd=False))  # noqa: SIM115

if sys.argv[:1] == ["-m"]:  # a command is being loaded, which takes seconds
    if sys.version_info < (3, 11):  # noqa: UP036 - a checkout runs without being installed
        sys.exit(f"error: Python is {sys.version.split()[0]}, but must be 3.11 or later")
    if importlib.util.find_spec("jax") is None:
        sys.exit(
            f"error: {sys.executable} has no jax: run `pip install -e '.[experiments]'` in the "
            "checkout, or use the python of the environment that has it (.venv/bin/python)"
        )
    if sys.stderr.isatty():
        print("loading JAX ...", file=sys.stderr, flush=True)
