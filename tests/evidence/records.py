"""Lines of results.jsonl: a reported number, and what is needed to repeat it."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import registry
from experiments.harness.results.comparing import compare
from experiments.harness.results.run_facts import seconds_of
from experiments.harness.runs.environment import environment_of
from experiments.harness.runs.run_folder import load_config
from jaxformer.config import from_plain, to_plain
from jaxformer.errors import ConfigError, DataError
from tests.evidence.settings import changed_settings, digest

FILE = "results.jsonl"
_VERSIONS = ("python", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A reported number and where it comes from; None is what is not known."""

    table: str
    """The table that shows it."""
    system: str
    """The name of what was scored."""
    metric: str
    score: float
    """The mean over the seeds."""
    interval: float | None = None
    """Half of the 95 % bootstrap interval over test items."""
    seeds: list[int] | None = None
    """Empty for a number that depends on no seed."""
    scores: list[float] | None = None
    """The score of each seed."""
    deviation: float | None = None
    """The deviation of the scores of the seeds (n - 1)."""
    text: str | None = None
    """The part of the text that was scored."""
    text_sha256: str | None = None
    signature: str | None = None
    """sacreBLEU's signature."""
    command: str | None = None
    config_sha256: str | None = None
    """SHA-256 of the settings that differ from their defaults, without seed and name."""
    commit: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    seconds: float | None = None
    """The time of the training and its scores, over all starts, of one seed."""
    date: str | None = None


def results_of(
    paths: Iterable[str | Path], table: str, system: str = "", metrics: Iterable[str] = ()
) -> list[Result]:
    """A result for each group of the runs in `paths` and each of `metrics` (see `compare`)."""
    paths, results = list(paths), []
    for metric in list(metrics) or [""]:
        comparison = compare(paths, metric)
        for group in comparison.groups:
            name = system if len(comparison.groups) == 1 else f"{system} {group.name}"
            first = group.runs[0]
            results.append(
                Result(
                    table=table,
                    system=name.strip() or group.name,
                    metric=comparison.metric,
                    score=group.mean,
                    interval=None if math.isnan(group.items) else group.items,
                    seeds=[run.seed for run in group.runs],
                    scores=[run.value for run in group.runs],
                    deviation=None if math.isnan(group.deviation) else group.deviation,
                    text=first.text,
                    text_sha256=first.digest or None,
                    signature=first.signature or None,
                    **_origin(first.folder),
                )
            )
    return results


def read(path: Path) -> list[Result]:
    """The results in the file `path`; `DataError` names a line that is none."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(from_plain(Result, json.loads(line)))
        except (ValueError, ConfigError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return lines


def append(path: Path, new: Sequence[Result]) -> None:
    """Adds a line for each of `new`, in place of one of the same table, system and metric."""
    lines: dict[tuple[str, ...], str] = {}
    if path.is_file():
        known = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = dict(zip(map(_key, read(path)), known, strict=True))
    lines |= {_key(line): json.dumps(to_plain(line)) + "\n" for line in new}
    path.write_text("".join(lines.values()), encoding="utf-8")


def _key(line: Result) -> tuple[str, ...]:
    return line.table, line.system, line.metric


def _settings_digest(folder: Path) -> str | None:
    """The digest of the settings of the run in `folder`; None for another experiment's run."""
    presets = (registry.find(name).PRESETS.values() for name in registry.NAMES)
    kinds = dict.fromkeys(type(preset) for each in presets for preset in each)
    try:
        return digest(changed_settings(load_config(folder, *kinds)))
    except ConfigError:
        return None


def _origin(folder: Path) -> dict[str, Any]:
    """The command, code and machine of the run in `folder`."""
    environment = environment_of(folder).read()
    devices = ", ".join(environment.get("devices", []))
    commit = environment.get("git_commit")
    return {
        "command": environment.get("command"),
        "config_sha256": _settings_digest(folder),
        "commit": f"{commit}, changed" if commit and environment.get("git_changed") else commit,
        "versions": {name: environment[name] for name in _VERSIONS if name in environment},
        "device": f"{devices}, {environment.get('cpus', '?')} CPU cores",
        "seconds": seconds_of(environment),
        "date": environment.get("time", "")[:10] or None,
    }
