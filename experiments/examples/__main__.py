"""The commands here: `python -m experiments.examples`."""

from experiments import command_list

command_list.show("experiments.examples")
