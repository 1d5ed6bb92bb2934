"""The machinery of all experiments, in five rooms that import only the ones before them.

`cli`: the command line and the screen. `runs`: a run's folder, processes, texts and loggers.
`training`: the loop of a run and what it is made of. `results`: runs compared and shown.
`planning`, which does not import `results`: the programs of a run, compiled for other devices.
"""
