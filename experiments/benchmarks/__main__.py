"""The commands here: `python -m experiments.benchmarks`."""

from experiments import command_list

command_list.show("experiments.benchmarks")
