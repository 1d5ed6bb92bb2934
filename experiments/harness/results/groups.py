"""Groups of runs that differ in the seed alone."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.harness.results.run_settings import seed_of, settings_of, shared_settings
from jaxformer import storage
from jaxformer.errors import ConfigError

_LONGEST = 40
"""Characters of a name that is made of settings; a longer one is the first run's name."""


class Group(NamedTuple):
    """Runs of equal settings, and what tells them from the other groups."""

    name: str
    folders: list[Path]
    values: Mapping[str, str] = {}
    """The settings in which groups differ, as JSON."""

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [seed_of(folder) for folder in self.folders]

    @property
    def label(self) -> str:
        """The name, with the number of seeds; of runs that share seeds, with the number of runs."""
        runs, seeds = len(self.folders), len(set(self.seeds))
        if runs == 1:
            return self.name
        if runs == seeds:
            return f"{self.name} ({runs} seeds)"
        shared = f"of seed {self.seeds[0]}" if seeds == 1 else f"of {seeds} seeds"
        return f"{self.name} ({runs} runs {shared})"


def group_runs(folders: Sequence[Path], baseline: str = "") -> list[Group]:
    """Groups in the order of their first runs; the runs of a group are in the order of seeds.

    A group is called by the settings in which it differs from others, or as its first run without
    the seed; the group of a sweep's runs that change nothing is then called unchanged. The group of
    the run `baseline` is the first; `ConfigError` where it is in none.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Path]] = {}
    for folder in folders:
        key = tuple(sorted(shared_settings(settings_of(folder)).items()))
        groups.setdefault(key, []).append(folder)
    settings = [dict(key) for key in groups]
    fields = sorted({field for values in settings for field in values})
    differing = [f for f in fields if len({values.get(f) for values in settings}) > 1]
    different = [{f: values.get(f, "absent") for f in differing} for values in settings]
    names = _names(different, [runs[0].name for runs in groups.values()])
    made = [
        Group(name, sorted(runs, key=seed_of), values)
        for name, runs, values in zip(names, groups.values(), different, strict=True)
    ]
    if not baseline:
        return made
    path = storage.to_path(baseline).resolve()
    first = [group for group in made if path in [folder.resolve() for folder in group.folders]]
    if not first:
        raise ConfigError(f"baseline={baseline!r} is none of the runs that are compared")
    return first + [group for group in made if group not in first]


def _names(values: Sequence[dict[str, str]], runs: Sequence[str]) -> list[str]:
    """A name for each group, all different."""
    names = [", ".join(f"{f.split('.')[-1]}={x}" for f, x in each.items()) for each in values]
    names = [name.replace('"', "") for name in names]
    shortened = [re.sub(r"(^|,)seed=\d+$", "", run) or "unchanged" for run in runs]
    if all(0 < len(name) <= _LONGEST for name in names) and len(set(names)) == len(names):
        return names
    return shortened if len(set(shortened)) == len(runs) else list(runs)
