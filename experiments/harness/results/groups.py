"""Runs whose settings differ in the seed alone, as one group."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.cli import config_files
from jaxformer.errors import ConfigError

_FREE = (
    *("name", "runs", "sweep", "training.seed"),
    *("verbose", "profile", "compilation_cache_dir", "text_cache_dir", "coordinator", "process_id"),
    *("training.log_every", "training.log_attention"),
    *("training.metrics", "training.loggers", "training.prefetch"),
)
"""Settings that runs of one group may differ in: the seed, folders, and what is only logged."""
_LONGEST = 40
"""Characters of a name that is made of settings; a longer one is that of the first run."""


class Group(NamedTuple):
    """Runs of equal settings, and what tells them from the other groups."""

    name: str
    folders: list[Path]

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [seed_of(folder) for folder in self.folders]


def find_runs(folders: Iterable[str | Path]) -> Iterator[Path]:
    """The folders in or below `folders` that hold a run; numbers in names are in their order."""
    for folder in folders:
        yield from sorted((path.parent for path in Path(folder).rglob("env.json")), key=_in_order)


def _in_order(folder: Path) -> str:
    return re.sub(r"(?<![.\d])\d+", lambda number: number[0].zfill(9), str(folder))


def expand(paths: Iterable[str | Path], *, finished: bool = False) -> list[Path]:
    """The runs that `paths` name: each a run's folder, or one with runs below it, as of a sweep.

    With `finished` those below a folder count only if they have been scored. Raises `ConfigError`
    for a path without a run, and for no path at all.
    """
    runs: dict[Path, None] = {}
    for path in map(Path, paths):
        below = [path] if (path / "config.json").is_file() else list(find_runs([path]))
        if finished and below != [path]:
            below = [run for run in below if (run / "scores.json").is_file()]
        if not below:
            raise ConfigError(
                f"{path} is not the folder of a run: it has no config.json, and there is no "
                f"{'finished ' if finished else ''}run below it"
            )
        runs.update(dict.fromkeys(below))
    if not runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or that of a sweep")
    return list(runs)


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """Groups in the order of their first runs; the runs of a group are in the order of seeds.

    A group is called by the settings in which it differs from others, or as its first run without
    the seed; the group of a sweep's runs that change nothing is then called unchanged.
    """
    groups: dict[str, list[Path]] = {}
    settings: list[dict[str, str]] = []
    for folder in folders:
        values = shared_settings(settings_of(folder))
        key = json.dumps(values, sort_keys=True)
        if key not in groups:
            settings.append(values)
        groups.setdefault(key, []).append(folder)
    names = _names(settings, [runs[0].name for runs in groups.values()])
    return [
        Group(name, sorted(runs, key=seed_of))
        for name, runs in zip(names, groups.values(), strict=True)
    ]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a run, empty where the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def settings_of(path: Path) -> dict[str, str]:
    """Dotted names and JSON texts of the settings of a run's folder, or in a settings file."""
    return config_files.flat(config_files.read_object(path))


def shared_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Those of a run's `settings` that all runs of its group have, and its scores depend on."""
    return {name: text for name, text in settings.items() if name not in _FREE}


def experiment_of(folder: Path) -> str:
    """The experiment of the run in `folder`, RUNS/EXPERIMENT/NAME."""
    return folder.absolute().parent.name


def seed_of(folder: Path) -> int:
    """The seed of the run in `folder`."""
    return int(json.loads(settings_of(folder).get("training.seed", "0")))


def _names(settings: Sequence[dict[str, str]], runs: Sequence[str]) -> list[str]:
    """A name for each group, all different."""
    fields = sorted({field for values in settings for field in values})
    differing = [f for f in fields if len({values.get(f) for values in settings}) > 1]
    names = [
        ", ".join(f"{f.split('.')[-1]}={values.get(f, 'absent')}" for f in differing)
        for values in settings
    ]
    names = [name.replace('"', "") for name in names]
    readable = all(0 < len(name) <= _LONGEST for name in names) and len(set(names)) == len(names)
    shortened = [re.sub(r"(^|,)seed=\d+$", "", run) or "unchanged" for run in runs]
    return names if readable else shortened if len(set(shortened)) == len(runs) else list(runs)
