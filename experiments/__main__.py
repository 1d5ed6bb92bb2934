"""The commands here: `python -m experiments`."""

from experiments import command_list

command_list.show("experiments")
