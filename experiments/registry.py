"""Experiments, by name or by the path of their module.

An experiment is a module with five names: `EXPERIMENT` (its runs are in RUNS/EXPERIMENT),
`PRESETS` (named configurations of one class; the first is the default), `train` (a function of a
configuration and `loggers`), `planned` (what `experiments.plan` compiles, a `PlannedTraining`) and
`page_contents` (what a page shows of a run besides scores and curves). The last two may be missing,
or stand in modules `plan` and `page` next to a module `train`. One of your own needs no entry: its
path is its name, as in `python -m experiments.sweep my_package.train --seeds 3`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from experiments.harness import cli
from jaxformer.errors import ConfigError

T = TypeVar("T")

NAMES = {
    "translation": "experiments.translation.train",
    "language_modelling": "experiments.language_modelling.train",
    "finetuning": "experiments.language_modelling.finetune",
}
"""Short names of the experiments that are here."""


class Command(NamedTuple, Generic[T]):
    """A command about an experiment, as it was typed."""

    experiment: ModuleType
    config: Any
    """The configuration of a run of the experiment."""
    options: T
    """The options of the command itself."""
    typed: Sequence[str]
    """Dotted names of the settings of `config` that were typed."""


def parse(args: Sequence[str], options: T, description: str | None) -> Command[T]:
    """The command of the words `args`, which begin from the defaults `options`.

    The experiment is a known name, else the first word. The words end the process as the words of
    `cli.parse` do.
    """
    first = next(iter(args), "--help")
    if first in ("-h", "--help"):
        cli.parse({"default": options}, ["--help"], description)
    name, words = next((word for word in args if word in NAMES), first), list(args)
    module = find(name)
    words.remove(name)
    options, words = cli.take_options(options, words)
    config, typed = cli.parse_base(module.PRESETS, words, description)
    return Command(module, config, options, typed)


def find(name: str) -> ModuleType:
    """The experiment called `name`, or in the module `name`; `ConfigError` where there is none."""
    path = NAMES.get(name, name)
    if "." not in path:
        raise ConfigError(
            f"experiment={name!r} is unknown: give {', '.join(NAMES)}, or the module of your own "
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
    return module


def planned(name: str) -> Any:
    """The programs of an experiment, for `plan`; `ConfigError` for one that names none."""
    module = find(name)
    value = _part(module, "planned", "plan")
    if value is None:
        raise ConfigError(
            f"experiment={name!r}: {module.__name__} has no `planned`: define it, a PlannedTraining"
        )
    return value


def page_contents(name: str) -> Callable[..., Any] | None:
    """The function that makes an experiment's part of a page; None where it has none."""
    return _part(find(name), "page_contents", "page")


def _part(module: ModuleType, word: str, sibling: str) -> Any:
    """The value `word` of an experiment, or of the `sibling` of its module train; None: absent."""
    path = f"{module.__name__.removesuffix('.train')}.{sibling}"
    if not hasattr(module, word) and module.__name__.endswith(".train"):
        module = importlib.import_module(path) if importlib.util.find_spec(path) else module
    return getattr(module, word, None)


def of_config(config: Any) -> ModuleType:
    """The experiment of the run `config`; `ConfigError` where none of those here has it."""
    for module in map(find, NAMES):
        if any(type(config) is type(preset) for preset in module.PRESETS.values()):
            return module
    raise ConfigError(
        f"{type(config).__name__} belongs to no experiment ({', '.join(NAMES)}): give the module "
        "of yours as experiment"
    )
