"""The settings of runs, and which of them the runs of a group share."""

import json
from collections.abc import Mapping
from pathlib import Path

from experiments.harness.cli import config_files

_FREE = (
    "name",
    "runs",
    "sweep",
    "training.seed",
    "verbose",
    "profile",
    "text_cache_dir",
    "coordinator",
    "process_id",
    "training.log_every",
    "training.metrics",
    "training.loggers",
    "training.prefetch",
)
"""Settings that runs of one group may differ in: the seed, folders, and what is only logged."""


def settings_of(path: Path) -> dict[str, str]:
    """Dotted names and JSON texts of the settings of a run's folder, or in a settings file."""
    return config_files.flat(config_files.read_object(path))


def shared_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The part of a run's `settings` that its group shares, and that its scores depend on."""
    return {name: text for name, text in settings.items() if name not in _FREE}


def experiment_of(folder: Path) -> str:
    """The experiment of the run in `folder`, RUNS/EXPERIMENT/NAME."""
    return folder.absolute().parent.name


def seed_of(folder: Path) -> int:
    """The seed of the run in `folder`."""
    return int(json.loads(settings_of(folder).get("training.seed", "0")))
