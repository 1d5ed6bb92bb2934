"""Finished or unfinished runs handed to experiment trackers, read from their folders."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.harness.cli import config_files
from experiments.harness.results.groups import settings_of
from experiments.harness.results.scored_runs import numbers
from experiments.harness.runs.run_folder import Run
from jaxformer import optional_dependencies

Tracker = Literal["tensorboard-hparams", "trackio", "wandb"]


class TrackedRun(NamedTuple):
    """What a tracker gets of a run: settings by dotted names, lines of metrics, final scores."""

    name: str
    group: str
    settings: dict[str, Any]
    metrics: list[dict[str, float]]
    scores: dict[str, float]


def read_run(folder: Path, group: str) -> TrackedRun:
    """The run in `folder`; its final scores have names such as test_bleu."""
    settings = {name: json.loads(text) for name, text in settings_of(folder).items()}
    path = folder / "scores.json"
    found = config_files.read_object(path) if path.is_file() else {}
    scores = {f"{found['text']}_{name}": value for name, value in numbers(found).items()}
    return TrackedRun(folder.name, group, settings, Run(folder).metrics(), scores)


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
    """Writes the run as an offline run of W&B; a second export has the same id."""
    wandb = optional_dependencies.load("wandb")
    output.mkdir(parents=True, exist_ok=True)
    run_id = hashlib.sha256(f"{run.name}{run.settings}".encode()).hexdigest()[:12]
    options: dict[str, Any] = {"mode": os.environ.get("WANDB_MODE", "offline"), "id": run_id}
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
    "tensorboard-hparams": to_tensorboard,
    "trackio": to_trackio,
    "wandb": to_wandb,
}
"""What writes a run of a project below a folder, and says where it is."""


def _last_step(run: TrackedRun) -> int:
    return int(run.metrics[-1]["step"]) if run.metrics else 0
