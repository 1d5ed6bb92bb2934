"""Commands that train, measure and show models: `python -m experiments.EXPERIMENT.COMMAND`.

Importing the package changes nothing of the process.
"""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m` is looking for the module of a command
    from experiments import process_start

    process_start.open_closed_streams()
    process_start.check_environment()
