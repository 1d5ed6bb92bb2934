"""Runs handed to experiment trackers, read from their folders, finished or not."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.harness.results.groups import read_json, settings_of
from experiments.harness.results.scored_runs import numbers
from experiments.harness.runs.run_folder import Run
from jaxformer import optional_dependencies

Tracker = Literal["tensorboard", "trackio", "wandb"]


class TrackedRun(NamedTuple):
    """The part of a run that a tracker gets: settings by dotted names, metrics, final scores."""

    name: str
    group: str
    started: str
    """The time of its first start, which no resuming changes."""
    settings: dict[str, Any]
    metrics: list[dict[str, float]]
    scores: dict[str, float]

    @property
    def id(self) -> str:
        """A name of the run that stays the same when the run is resumed, also with more steps."""
        return hashlib.sha256(f"{self.name} {self.started}".encode()).hexdigest()[:12]


def read_run(folder: Path, group: str) -> TrackedRun:
    """The run in `folder`; its final scores have names such as test_bleu."""
    settings = {name: json.loads(text) for name, text in settings_of(folder).items()}
    scores, environment = (read_json(folder / f"{name}.json") for name in ("scores", "env"))
    first_start = [*environment.get("earlier", []), environment][0]
    return TrackedRun(
        folder.name,
        group,
        first_start.get("time", ""),
        settings,
        Run(folder).metrics(),
        {f"{scores['text']}_{name}": value for name, value in numbers(scores).items()},
    )


def to_tensorboard(run: TrackedRun, project: str, output: Path) -> str:
    """Writes curves, settings and final scores for TensorBoard's table of hyperparameters."""
    writers = optional_dependencies.load("tensorboardX")
    summaries = optional_dependencies.load("tensorboardX.summary")
    folder = output / project / run.name
    for old in folder.glob("events.*"):
        old.unlink()
    plain = (bool, int, float, str)
    settings = {k: v if isinstance(v, plain) else json.dumps(v) for k, v in run.settings.items()}
    with writers.SummaryWriter(str(folder)) as writer:
        for summary in summaries.hparams(settings, run.scores):
            writer.file_writer.add_summary(summary)
        for line in [*run.metrics, {"step": _last_step(run), **run.scores}]:
            for name, value in line.items():
                if name != "step":
                    writer.add_scalar(name, value, int(line["step"]))
    return f"{folder}: look at it with tensorboard --logdir {output / project}"


def to_trackio(run: TrackedRun, project: str, output: Path) -> str:
    """Writes the run to trackio's folder; one of the same name there is replaced."""
    os.environ.setdefault("TRACKIO_DIR", str(output.absolute()))
    trackio = optional_dependencies.load("trackio")
    with contextlib.suppress(ValueError):  # there is no such project yet
        for old in trackio.Api().runs(project):
            if old.name == run.name:
                old.delete()
    options: dict[str, Any] = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
    trackio.init(project, run.name, run.group, config=run.settings, **options)
    for line in run.metrics:
        trackio.log({k: v for k, v in line.items() if k != "step"}, step=int(line["step"]))
    trackio.log(run.scores, step=_last_step(run))
    trackio.finish()
    return f"{os.environ['TRACKIO_DIR']}: look at it with trackio show --project {project}"


def to_wandb(run: TrackedRun, project: str, output: Path) -> str:
    """Writes the run as an offline run of W&B; another export of it, resumed or not, replaces it
    when both are sent, because it has the same id."""
    wandb = optional_dependencies.load("wandb")
    output.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"mode": os.environ.get("WANDB_MODE", "offline"), "id": run.id}
    with wandb.init(
        project=project,
        name=run.name,
        group=run.group,
        config=run.settings,
        dir=str(output),
        **options,
    ) as started:
        for line in run.metrics:
            values = {k: v for k, v in line.items() if k != "step"}
            started.log(values, step=int(line["step"]))
        started.summary.update(run.scores)
        folder = Path(started.dir).parent
    return f"{folder}: send it with wandb sync {folder}"


TRACKERS: dict[Tracker, Callable[[TrackedRun, str, Path], str]] = {
    "tensorboard": to_tensorboard,
    "trackio": to_trackio,
    "wandb": to_wandb,
}
"""Functions that write a run of a project below a folder, and return where it is."""


def _last_step(run: TrackedRun) -> int:
    return int(run.metrics[-1]["step"]) if run.metrics else 0
