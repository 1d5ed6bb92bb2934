"""Commands that train, measure and show models: `python -m experiments.EXPERIMENT.COMMAND`."""

import sys

if sys.argv[:1] == ["-m"] and sys.stderr.isatty():  # a command is being loaded, which takes seconds
    print("loading JAX ...", file=sys.stderr, flush=True)
