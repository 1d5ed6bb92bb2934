"""Settings of a configuration by their dotted names, and a digest that new fields do not change."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.harness.cli import config_files
from experiments.harness.results.run_settings import shared_settings
from jaxformer.config import to_plain

Settings = Mapping[str, str]
"""Dotted names -> JSON texts."""


def settings_of_config(config: Any) -> dict[str, str]:
    """All settings of the dataclass `config`."""
    return config_files.flat(to_plain(config))


def changed_names(config: Any, prefix: str = "") -> Iterator[str]:
    """The names of the settings that differ from the defaults of the classes they are in.

    A part of another class than its default is named by its type.
    """
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), _default_of(field)
        if dataclasses.is_dataclass(value):
            if dataclasses.is_dataclass(default) and type(value) is not type(default):
                yield f"{prefix}{field.name}.type"
            yield from changed_names(value, f"{prefix}{field.name}.")
        elif value != default:
            yield prefix + field.name


def _default_of(field: dataclasses.Field) -> Any:
    """The default of `field`; MISSING, which equals no value, for one without."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def changed_settings(config: Any) -> dict[str, str]:
    """The settings of `config` that differ from the defaults of the classes they are in."""
    settings = settings_of_config(config)
    return {name: settings[name] for name in changed_names(config) if name in settings}


def digest(changed: Settings) -> str:
    """SHA-256 of settings, without those in which the runs of a group may differ."""
    text = json.dumps(shared_settings(changed), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
