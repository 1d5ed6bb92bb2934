"""Hand runs to a tracker: `python -m experiments.export_metrics RUN|SWEEP .. --to trackio`.

Reads the folders of runs: settings, metrics.jsonl and scores.json. No training needs a tracker.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results.groups import expand, group_runs
from experiments.harness.results.trackers import TRACKERS, Tracker, read_run
from jaxformer.config import check_choices
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class ExportOptions:
    """Which runs, and to which tracker."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them, as of a sweep."""
    to: Tracker = "tensorboard-hparams"
    """The tracker. trackio and wandb need the extra tracking; W&B writes offline runs, unless the
    environment has WANDB_MODE."""
    project: str = "jaxformer"
    """The project in the tracker."""
    output: str = "runs/tracking"
    """The folder that the tracker writes to; of trackio TRACKIO_DIR comes first."""

    def __post_init__(self):
        check_choices(self)


def main(options: ExportOptions) -> None:
    """Exports the runs, and prints where each is."""
    if not options.runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or that of a sweep")
    for group in group_runs(expand(options.runs)):
        for folder in group.folders:
            run = read_run(folder, group.name)
            print(TRACKERS[options.to](run, options.project, Path(options.output)))


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__, positional="runs")
