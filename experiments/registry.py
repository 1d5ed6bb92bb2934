"""The experiments, by name: the one place that lists them.

An experiment is a module with a `train` function and `PRESETS`, such as
`experiments.translation.train`. One of your own needs no entry: its module is its name, as in
`python -m experiments.sweep my_package.train --seeds 3`, and `register` gives it a shorter one.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.harness.runs.checkpoint_selection import TrainResult
from jaxformer.errors import ConfigError

_MODULES = {
    "translation": "experiments.translation.train",
    "language_modelling": "experiments.language_modelling.train",
    "finetuning": "experiments.language_modelling.finetune",
}


class Experiment(NamedTuple):
    """An experiment: how its runs are configured and trained."""

    name: str
    """Its runs are in RUNS/NAME."""
    presets: Mapping[str, Any]
    """Named configurations, all of one class; the first is the default."""
    train: Callable[..., TrainResult]
    """A function of a configuration and `loggers` that trains, and resumes, a run."""

    @property
    def config(self) -> type:
        """The class of the configurations."""
        return type(next(iter(self.presets.values())))


def names() -> tuple[str, ...]:
    """The names of all registered experiments."""
    return tuple(_MODULES)


def register(name: str, module: str) -> None:
    """Makes the experiment in `module` known as `name`."""
    _MODULES[name] = module


def find(name: str) -> Experiment:
    """The experiment that is registered as `name`, or that is in the module `name`.

    Raises `ConfigError` where there is none.
    """
    path = _MODULES.get(name, name)
    if "." not in path:
        raise ConfigError(
            f"experiment={name!r} is unknown: give {', '.join(names())}, or the module of your own "
            "as package.module"
        )
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ConfigError(
            f"experiment={name!r}: there is no module {error.name!r}: start the command in the "
            "folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    for word in ("EXPERIMENT", "PRESETS", "train"):
        if not hasattr(module, word):
            raise ConfigError(f"experiment={name!r}: the module {path} has no {word}: define it")
    return Experiment(module.EXPERIMENT, module.PRESETS, module.train)


def of_config(config: Any) -> Experiment:
    """The registered experiment of the run `config`; `ConfigError` where there is none."""
    for name in names():
        experiment = find(name)
        if type(config) is experiment.config:
            return experiment
    raise ConfigError(
        f"{type(config).__name__} belongs to no experiment ({', '.join(names())}): register it"
    )
