"""Values of the user's own, which a run's configuration names."""

from operator import attrgetter
from typing import Any, TypeVar

from experiments.harness.training.experiment_config import ExperimentConfig
from jaxformer.config import import_by_name, is_import_name, name_of, with_fields

C = TypeVar("C")


VALUES = {
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
"""Arguments whose field may also have a name of the library's."""


def with_values(config: C, **values: Any) -> C:
    """The run's `config` with the names of `values` (see `VALUES`); None keeps what it says.

    Raises `ConfigError` as `name_of` does, `TypeError` for an unknown argument.
    """
    names: dict[str, Any] = {}
    for argument, value in values.items():
        if argument not in VALUES:
            raise TypeError(f"train() has no argument {argument!r}: give {', '.join(VALUES)}")
        if value is None:
            continue
        field = VALUES[argument]
        several = value if argument == "metrics" else (value,)
        name = tuple(name_of(each, argument) for each in several)
        if argument == "dataset":  # files, or the two sides of a parallel text
            kind = type(attrgetter(field)(config))
            names[field] = name if kind is tuple else kind(*name)
        else:
            names[field] = name if argument == "metrics" else name[0]
    return with_fields(config, names)


def check_named_values(config: ExperimentConfig) -> None:
    """Raises `ConfigError` unless each name in the run's `config` leads to a value."""
    for argument, path in {**VALUES, "loggers": "training.loggers"}.items():
        if argument in ("dataset", "tokenizer"):  # names among files; read with them
            continue
        group, _, field = path.partition(".")
        stored = getattr(getattr(config, group), field, "")  # an experiment may lack the option
        names = stored if isinstance(stored, tuple) else (stored,)
        for name in names:
            needed = is_import_name(name) if argument in _BUILT_IN else bool(name)
            if needed:
                import_by_name(name, argument)
