"""What there is to say of a run in words: its state, scores, length, speed and machine."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.results import statistics
from experiments.harness.results.groups import (
    find_runs,
    group_runs,
    item_sums,
    main_metric,
    numbers,
)
from experiments.harness.results.plots import Interval, best_first
from experiments.harness.results.quantities import quantity, shown
from experiments.harness.runs.loggers import MetricsFile
from jaxformer.checkpoint.lock import is_locked
from jaxformer.records import Record

COUNTS = ("sentences", "words", "tokens", "bytes")
"""Numbers of scores.json that say how long the text is."""
_NO_SCORES = (*COUNTS, "nats", "stride")


def _read(folder: Path, name: str) -> dict[str, Any]:
    return Record(folder / f"{name}.json").read_if_intact()


def state_of(folder: Path) -> str:
    """Whether the run in `folder` is running, done, failed or stopped; "" if it never began.

    A run that has left neither a step nor a checkpoint never began.
    """
    if is_locked(folder / "checkpoints"):
        return "running"
    if all((folder / name).is_file() for name in ("scores.json", "weights.json")):
        return "done"
    if not steps_of(folder):
        return ""
    return "failed" if "failed" in _read(folder, "env") else "stopped"


def steps_of(folder: Path) -> int:
    """The last step that the run in `folder` has logged or saved."""
    saved = (folder / "checkpoints").glob("[0-9]*")
    logged = MetricsFile(folder).read()[-1:]
    return max([0, *(line["step"] for line in logged), *(int(path.name) for path in saved)])


def describe_state(folder: Path) -> str:
    """The state and the reason for it, such as "stopped at step 40 of 1,000"."""
    state, failure = state_of(folder) or "stopped", _read(folder, "env").get("failed")
    return f"{state} at step {_reached(folder)}" + f": {failure}" * (state == "failed")


def _reached(folder: Path) -> str:
    total = _read(folder, "config").get("optimizer", {}).get("total_steps")
    return f"{steps_of(folder):,}" + (f" of {total:,}" if isinstance(total, int) else "")


def scores_of(folder: Path, *, intervals: bool = False) -> dict[str, str]:
    """The names and values of scores.json, that of the default metric first.

    With `intervals` they are rounded to what other test items leave certain.
    """
    scores = _read(folder, "scores")
    values = {x: y for x, y in numbers(scores).items() if x not in _NO_SCORES}
    first, texts = main_metric(values), {}
    for metric in sorted(values, key=lambda name: name != first):
        sums = item_sums(folder, metric, scores) if intervals else None
        half = statistics.item_half_width(*sums) if sums and len(sums[0]) > 1 else math.nan
        kind = quantity(metric)
        text = statistics.rounded(values[metric] * kind.scale, half * kind.scale)
        texts[kind.label] = f"{text} {kind.unit}".strip()
    return texts


def facts_of(folder: Path) -> dict[str, str]:
    """What the run in `folder` is called, how far it is, how long it took, on what and how fast."""
    config, environment = _read(folder, "config"), _read(folder, "env")
    lines = MetricsFile(folder).read()
    first = [*environment.get("earlier", []), environment][0]
    weights = _read(folder, "weights").get("steps", [])
    seconds = seconds_of(environment)
    facts = {
        "run": folder.name,
        "seed": str(config.get("training", {}).get("seed", 0)),
        "state": state_of(folder),
        "steps": _reached(folder),
        "weights": f"of step {', '.join(f'{step:,}' for step in weights)}" if weights else "",
        "time": _duration(seconds) if seconds is not None else "",
        "device": devices_of(environment),
        "started": str(first.get("time", ""))[:16].replace("T", " "),
        "parent": _parent(folder),
    }
    for metric in ("tokens_per_second", "mfu", "memory_peak"):
        kind, values = quantity(metric), [line[metric] for line in lines if metric in line]
        if values:
            facts[kind.label] = f"{shown(kind.scale * float(np.median(values)))} {kind.unit}"
    return {name: text for name, text in facts.items() if text}


def newest_score(folder: Path) -> str:
    """Two of the final scores; before the end the newest of the validation; else ""."""
    final = list(scores_of(folder).items())[:2]
    if final:
        text = _read(folder, "scores").get("text", "")
        return ", ".join(f"{text} {name} {value}".strip() for name, value in final)
    for line in reversed(MetricsFile(folder).read()):
        validated = [name for name in line if name.startswith("validation_")][:2]
        if validated:
            return ", ".join(f"{quantity(x).label} {shown(line[x])}" for x in validated)
    return ""


def facts_of_sweep(folder: Path) -> dict[str, str]:
    """The states of the cells of the sweep in `folder`, the best score, and the first start."""
    runs = list(find_runs([folder]))
    states = [state_of(run) for run in runs]
    done = [run for run, state in zip(runs, states, strict=True) if state == "done"]
    counts = [f"{states.count(x)} {x}" for x in ("running", "failed", "stopped") if x in states]
    cells = len(_read(folder, "sweep").get("cells", {}))
    started = [facts_of(run).get("started", "-") for run in runs]
    return {
        "state": ", ".join([f"{len(done)} of {cells} cells done", *counts]),
        "score": _best_score(done),
        "started": min(started),
    }


def _best_score(folders: Sequence[Path]) -> str:
    """The best mean over seeds among `folders`, and the settings that have it; "-" for none."""
    scores = {folder: numbers(_read(folder, "scores")) for folder in folders}
    metric = main_metric(next(iter(scores.values()), {}))
    named = [
        Interval(group.name, [scores[folder][metric] for folder in group.folders], math.nan)
        for group in group_runs(folders)
        if all(metric in scores[folder] for folder in group.folders)
    ]
    if not named:
        return "-"
    best, kind = best_first(metric, named)[0], quantity(metric)
    value = f"{kind.label} {statistics.rounded(kind.scale * best.mean)}"
    return f"best {value} ({best.name})" if kind.better and len(named) > 1 else value


def _parent(folder: Path) -> str:
    """The run that this one began with, and its steps."""
    note, config = _read(folder, "parent"), _read(folder, "config")
    steps = ",".join(map(str, note.get("steps", [])))
    begun = f"{note['run']}{f'@{steps}' * bool(steps)}" if "run" in note else ""
    return begun or config.get("continue_from") or config.get("init_from") or ""


def devices_of(environment: Mapping[str, Any]) -> str:
    """The devices that env.json names, such as "8 x NVIDIA H100" or "cpu, 2 cores"."""
    kinds = Counter(name.partition(":")[2] for name in environment.get("devices", ()))
    words = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]
    if set(kinds) == {"cpu"} and "cpus" in environment:
        words.append(f"{environment['cpus']} cores")
    return ", ".join(words)


def seconds_of(environment: Mapping[str, Any]) -> float | None:
    """The time of a training and its scores by env.json; None where a start does not say how long
    it was."""
    earlier = [start.get("seconds") for start in environment.get("earlier", [])]
    if None in earlier or not {"time", "finished"} <= set(environment):
        return None
    started, ended = (datetime.fromisoformat(environment[x]) for x in ("time", "finished"))
    return float(round(sum(earlier) + (ended - started).total_seconds()))


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"
