"""Loggers for trackio, MLflow and Weights & Biases: `--training.loggers MODULE:Trackio`.

MODULE is experiments.examples.trackers. Each gets the run's configuration, curves and samples, and
its address stands on the run's page. A resumed run goes on in the tracker's run: trackers.json in
the run's folder keeps its id. trackio and MLflow are asked what they have, so each number of a step
is in them once, also where a run was killed after its last checkpoint. Weights & Biases is given
the same id, and the steps after the last checkpoint; what its server makes of those that it has
already was not tried.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxformer import optional_dependencies
from jaxformer.records import Record

PROJECT = "jaxformer"
"""The project, or experiment, in all trackers."""

RECORD = "trackers.json"


class Tracker(ABC):
    """A logger of a tracker's run, which goes on when the run in `folder` is resumed."""

    def __init__(self, folder: Path) -> None:
        self._sent: dict[str, int] = {}
        """The last step of each curve when the run was opened."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # The record has the runs of all trackers, by the names of their classes.
        record = Record(folder / RECORD)
        known = record.read_if_intact()
        name = type(self).__name__
        earlier_run = known.get(name, {}).get("run")
        run = self.open(folder.name, config, earlier_run)
        record.write({**known, name: {"run": run, "address": self.address()}})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to each curve that does not have it."""
        new = {name: x for name, x in metrics.items() if step > self.last_step(name)}
        if new:
            self.send(step, new)

    def last_step(self, name: str) -> int:
        """The last step of the curve `name` when the run was opened; -1: none."""
        return self._sent.get(name, -1)

    @abstractmethod
    def open(self, name: str, config: Mapping[str, Any], run: str | None) -> str:
        """Begins a run called `name`, or goes on with `run`; the id by which it is found again.

        It also fills `_sent` where the tracker tells what it has.
        """

    @abstractmethod
    def address(self) -> str:
        """The place where a person finds the run."""

    @abstractmethod
    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds points to curves."""

    @abstractmethod
    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Adds samples."""

    @abstractmethod
    def close(self) -> None:
        """Waits until all is written, and ends the tracker's run."""


class Trackio(Tracker):
    """trackio, in the folder TRACKIO_DIR, in a Space or on a server, as its variables say."""

    def open(self, name: str, config: Mapping[str, Any], run: str | None) -> str:
        """The name of the run, by which trackio finds it again."""
        trackio = optional_dependencies.load("trackio")
        run = run or f"{name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            PROJECT,
            run,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for point in trackio.SQLiteStorage.get_logs(PROJECT, run):
            for curve in point.keys() - {"step", "timestamp"}:
                self._sent[curve] = max(self.last_step(curve), point["step"])
        return run

    def address(self) -> str:
        """The server's address, or the command that shows what is here."""
        return getattr(self._run, "url", None) or f"trackio show --project {PROJECT}"

    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds points to curves."""
        self._run.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Adds samples as Markdown, unless it has them."""
        if step > self.last_step(name):
            text = "".join(f"    {line}\n" for line in lines)
            markdown = optional_dependencies.load("trackio").Markdown(text)
            self._run.log({name: markdown}, step=step)

    def close(self) -> None:
        """Waits until all is written, and ends the tracker's run."""
        self._run.finish()


class MLflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI."""

    def open(self, name: str, config: Mapping[str, Any], run: str | None) -> str:
        """The id that MLflow gave the run."""
        self._client = optional_dependencies.load("mlflow").MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        if experiment is None:
            self._experiment = self._client.create_experiment(PROJECT)
        else:
            self._experiment = experiment.experiment_id
        self._id = run or self._begin(name)
        self._client.update_run(self._id, status="RUNNING")
        data = self._client.get_run(self._id).data
        for field, value in _dotted(config).items():
            if field not in data.params:  # MLflow refuses a second value
                self._client.log_param(self._id, field, value)
        for curve in data.metrics:
            history = self._client.get_metric_history(self._id, curve)
            self._sent[curve] = max(point.step for point in history)
        return self._id

    def _begin(self, name: str) -> str:
        """The id of a new run called `name`."""
        return str(self._client.create_run(self._experiment, run_name=name).info.run_id)

    def address(self) -> str:
        """The address of the run, or the command that shows what is here."""
        uri = optional_dependencies.load("mlflow").get_tracking_uri()
        if uri.startswith("http"):
            return f"{uri}/#/experiments/{self._experiment}/runs/{self._id}"
        return f"mlflow ui --backend-store-uri {uri} (run {self._id})"

    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds points to curves."""
        for name, number in metrics.items():
            self._client.log_metric(self._id, name, number, step=step)

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Keeps samples as a file, which takes the place of an earlier one of the step."""
        self._client.log_text(self._id, "\n".join(lines) + "\n", f"{name}/{step}.txt")

    def close(self) -> None:
        """Ends the tracker's run."""
        self._client.set_terminated(self._id)


class WandB(Tracker):
    """Weights & Biases; with WANDB_MODE=offline in files that `wandb sync` sends later."""

    def open(self, name: str, config: Mapping[str, Any], run: str | None) -> str:
        """The id, by which the server finds the run again."""
        run = run or secrets.token_hex(4)
        self._wandb = optional_dependencies.load("wandb")
        self._run = self._wandb.init(
            project=PROJECT, name=name, id=run, config=dict(config), resume="allow"
        )
        return run

    def address(self) -> str:
        """The address of the run, or the command that sends its files."""
        files = Path(self._run.dir).parents[1] / f"offline-run-*-{self._run.id}"
        return self._run.url or f"wandb sync {files}"

    def send(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds points to curves."""
        self._run.log(dict(metrics), step=step)

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Adds samples as a table of one column."""
        table = self._wandb.Table(columns=[name], data=[[line] for line in lines])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        """Waits until all is written, and ends the tracker's run."""
        self._run.finish()


def _dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The settings by dotted names, as text.

    >>> _dotted({"data": {"seed": 3}, "name": "tiny"})
    {'data.seed': '3', 'name': 'tiny'}
    """
    fields: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields |= _dotted(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = str(value)
    return fields
