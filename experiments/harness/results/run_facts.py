"""Facts about a run in words: its state, scores, length, speed and machine."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.results.find_runs import find_runs
from experiments.harness.results.groups import group_runs
from experiments.harness.results.plots import Interval, best_of
from experiments.harness.results.scored_runs import item_sums, main_metric, numbers
from experiments.harness.results.sweep_failures import SWEEP, failures_of
from experiments.harness.results.token_units import token_unit
from experiments.harness.runs import bootstrap, rounding
from experiments.harness.runs.loggers import MetricsFile
from experiments.harness.runs.quantities import quantity
from experiments.harness.runs.rounding import shown
from jaxformer.checkpoint.lock import is_locked
from jaxformer.records import Record

COUNTS = ("sentences", "words", "tokens", "bytes")
"""Numbers of scores.json that say how long the text is."""
_NO_SCORES = (*COUNTS, "nats", "stride")


class RunFacts:
    """The files of the run in `folder`; a file that is missing or damaged is empty."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config, self.environment, self.scores, self.weights, self.parent = (
            Record(folder / f"{name}.json").read_if_intact()
            for name in ("config", "env", "scores", "weights", "parent")
        )
        self.lines = MetricsFile(folder).read()

    @property
    def steps(self) -> int:
        """The last step that the run has logged or saved."""
        saved = (self.folder / "checkpoints").glob("[0-9]*")
        logged = (line["step"] for line in self.lines[-1:])
        return max([0, *logged, *(int(path.name) for path in saved)])

    @property
    def state(self) -> str:
        """Whether the run is running, done, failed or stopped; "" if it never began.

        A run that has left neither a step nor a checkpoint never began.
        """
        if is_locked(self.folder / "checkpoints"):
            return "running"
        if all((self.folder / name).is_file() for name in ("scores.json", "weights.json")):
            return "done"
        if not self.steps:
            return ""
        return "failed" if "failed" in self.environment else "stopped"

    def describe_state(self) -> str:
        """The state and the reason for it, such as "stopped at step 40 of 1,000"."""
        failure = self.environment.get("failed")
        if failure and self.state in ("", "failed"):
            return f"failed at step {self._reached()}: {failure}"
        return f"{self.state or 'stopped'} at step {self._reached()}"

    def describe_scores(self, *, intervals: bool = False) -> dict[str, str]:
        """The names and values of scores.json, the default metric's first.

        With `intervals` they are rounded to what other test items leave certain.
        """
        values = {x: y for x, y in numbers(self.scores).items() if x not in _NO_SCORES}
        first = main_metric(values)
        texts = {}
        for metric in sorted(values, key=lambda name: name != first):
            sums = item_sums(self.folder, metric, self.scores) if intervals else None
            half = bootstrap.item_half_width(*sums) if sums and len(sums[0]) > 1 else math.nan
            kind = quantity(metric)
            text = rounding.rounded(values[metric] * kind.scale, half * kind.scale)
            texts[kind.label] = f"{text} {kind.unit}".strip()
        return texts

    def describe(self) -> dict[str, str]:
        """Its name, how far it is, how long it took, on what and how fast."""
        starts = [*self.environment.get("earlier", []), self.environment]
        weights = ", ".join(f"{step:,}" for step in self.weights.get("steps", []))
        seconds = seconds_of(self.environment)
        facts = {
            "run": self.folder.name,
            "seed": str(self.config.get("training", {}).get("seed", 0)),
            "state": self.state,
            "steps": self._reached(),
            "weights": f"of step {weights}" if weights else "",
            "time": _duration(seconds) if seconds is not None else "",
            "device": devices_of(self.environment),
            "started": str(starts[0].get("time", ""))[:16].replace("T", " "),
            "parent": self._begun_with(),
        }
        for metric in ("tokens_per_second", "mfu", "memory_peak"):
            kind = quantity(metric)
            values = [x[metric] for x in self.lines if metric in x]
            if values:
                facts[kind.label] = f"{shown(kind.scale * float(np.median(values)))} {kind.unit}"
        return {name: text for name, text in facts.items() if text}

    def newest_score(self) -> str:
        """Two of the final scores; before the end the newest of the validation; else "".

        A damaged scores.json is said instead.
        """
        if not self.scores and (self.folder / "scores.json").is_file():
            return "scores.json is damaged"
        if final := list(self.describe_scores().items())[:2]:
            text = self.scores.get("text", "")
            return ", ".join(f"{text} {name} {value}".strip() for name, value in final)
        for line in reversed(self.lines):
            validated = [name for name in line if name.startswith("validation_")][:2]
            if validated:
                return ", ".join(f"{quantity(x).label} {shown(line[x])}" for x in validated)
        return ""

    def _reached(self) -> str:
        total = self.config.get("optimizer", {}).get("total_steps")
        return f"{self.steps:,}" + (f" of {total:,}" if isinstance(total, int) else "")

    def _begun_with(self) -> str:
        """The run that this one began with, and its steps."""
        if "run" not in self.parent:
            return self.config.get("continue_from") or self.config.get("init_from") or ""
        steps = ",".join(map(str, self.parent.get("steps", [])))
        if not steps:
            return self.parent["run"]
        return f"{self.parent['run']}@{steps}"


def facts_of_sweep(folder: Path) -> dict[str, str]:
    """The states of the cells of the sweep in `folder`, the best score, and the first start."""
    runs = [RunFacts(run) for run in find_runs([folder])]
    failed = failures_of(folder)
    states = Counter(run.state for run in runs if run.folder.name not in failed)
    states["failed"] += len(failed)
    done = [run for run in runs if run.state == "done"]
    counts = [f"{states[x]} {x}" for x in ("running", "failed", "stopped") if states[x]]
    cells = len(Record(folder / SWEEP).read_if_intact().get("cells", {}))
    return {
        "state": ", ".join([f"{len(done)} of {cells} cells done", *counts]),
        "score": _best_score(done),
        "started": min(run.describe().get("started", "-") for run in runs),
    }


def _best_score(runs: Sequence[RunFacts]) -> str:
    """The best mean over seeds among `runs`, and the settings that have it; "-" for none.

    Scores per token of runs with different tokens have no best.
    """
    scores = {run.folder: numbers(run.scores) for run in runs}
    metric = main_metric(*scores.values())
    named = [
        Interval(group.name, [scores[folder][metric] for folder in group.folders], math.nan)
        for group in group_runs(list(scores))
        if all(metric in scores[folder] for folder in group.folders)
    ]
    if not named:
        return "-"
    if len({token_unit(folder, metric) for folder in scores}) > 1:
        return f"{quantity(metric).label} of different tokens"
    kind, best = quantity(metric), best_of(metric, named)
    first = best or named[0]
    value = f"{kind.label} {rounding.rounded(kind.scale * first.mean)}"
    if best is not None:
        return f"best {value} ({best.name})"
    return f"{value} in all" if len({each.mean for each in named}) == 1 < len(named) else value


def devices_of(environment: Mapping[str, Any]) -> str:
    """The devices that env.json names, such as "8 x NVIDIA H100" or "cpu, 2 cores"."""
    kinds = Counter(name.partition(":")[2] for name in environment.get("devices", ()))
    words = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]
    if set(kinds) == {"cpu"} and "cpus" in environment:
        words.append(f"{environment['cpus']} cores")
    return ", ".join(words)


def seconds_of(environment: Mapping[str, Any]) -> float | None:
    """The time of a training and its scores by env.json; None before its end, and where a start
    before it does not say how long it was.

    A start after the end, as one that was refused, adds the time in which it logged something.
    """
    starts = [*environment.get("earlier", []), environment]
    ended = [number for number, start in enumerate(starts) if {"time", "finished"} <= set(start)]
    if not ended:
        return None
    seconds = [_seconds_of_start(start) for start in starts]
    before = seconds[: ended[-1] + 1]
    if None in before:
        return None
    return float(round(sum(x for x in seconds if x is not None)))


def _seconds_of_start(start: Mapping[str, Any]) -> float | None:
    """The time of one start: to its end if it ended a training, else to the last line it logged."""
    if {"time", "finished"} <= set(start):
        begun, ended = (datetime.fromisoformat(start[x]) for x in ("time", "finished"))
        return (ended - begun).total_seconds()
    return start.get("seconds")


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"
