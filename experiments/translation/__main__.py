"""The commands here: `python -m experiments.translation`."""

from experiments import command_list

command_list.show("experiments.translation")
