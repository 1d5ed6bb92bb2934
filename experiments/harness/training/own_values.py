"""Values of your own in place of those that a run's configuration names, and what they add.

A value is named `package.module:name` in the configuration, or passed from Python to `train`, which
records its name: a resumed run and every later command use the same value.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness.cli import import_by_name, is_import_name, name_of
from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Logger, Loggers
from jaxformer.text.data import Batches
from jaxformer.training.optimizer import check_schedule_free

C = TypeVar("C")

_FIELDS = {
    "model": "training.model",
    "block": "training.block",
    "attention_fn": "training.attention_fn",
    "loss": "training.loss",
    "metrics": "training.metrics",
    "schedule": "optimizer.schedule",
    "optimizer": "optimizer.name",
    "batches": "data.batches",
    "dataset": "data.train",
    "tokenizer": "data.tokenizer",
}
"""The argument of `train` -> the field that names its value."""
_BUILT_IN = ("attention_fn", "schedule", "optimizer")
"""Those that may also be a name of the library's."""


def with_values(config: C, **values: Any) -> C:
    """The run's `config` with the names of `values` (see `_FIELDS`); None keeps what it says.

    Raises `ConfigError` as `name_of` does, `TypeError` for an unknown argument.
    """
    run: Any = config  # the configs of the experiments share these fields, but no class
    for argument, value in values.items():
        if argument not in _FIELDS:
            raise TypeError(f"train() has no argument {argument!r}: give {', '.join(_FIELDS)}")
        if value is None:
            continue
        group, _, field = _FIELDS[argument].partition(".")
        part = getattr(run, group)
        if argument == "metrics":
            name: Any = tuple(name_of(metric, argument) for metric in value)
        else:
            name = name_of(value, argument)
        if argument == "dataset":  # files, or the two sides of a parallel text
            kind = type(part.train)
            name = (name,) if kind is tuple else kind(name)
        run = replace(run, **{group: replace(part, **{field: name})})
    return run


def check(config: Any) -> None:
    """Raises `ConfigError` unless each name in the run's `config` leads to a value."""
    if config.training.schedule_free:
        check_schedule_free(config.optimizer)
    for argument, path in {**_FIELDS, "loggers": "training.loggers"}.items():
        group, _, field = path.partition(".")
        stored = getattr(getattr(config, group), field)
        for name in stored if isinstance(stored, tuple) else (stored,):
            needed = is_import_name(name) if argument in _BUILT_IN else bool(name)
            if needed and argument not in ("dataset", "tokenizer"):
                import_by_name(name, argument)


def build_loggers(training: Any, folder: Path, loggers: Iterable[Logger]) -> Loggers:
    """`loggers`, and those that `training` names, each called with the run's `folder`.

    Of several processes only the first one has them.
    """
    if not distributed.is_first():
        return Loggers()
    named = (import_by_name(name, "loggers")(folder) for name in training.loggers)
    return Loggers([*loggers, *named])


def build_batches(config: Any, prepared: Any) -> Batches:
    """The batches that `config.data` names, made of (config, prepared), or those of `prepared`."""
    name = config.data.batches
    return import_by_name(name, "batches")(config, prepared) if name else prepared.batches
