"""The commands here: `python -m experiments.language_modelling`."""

from experiments import command_list

command_list.show("experiments.language_modelling")
