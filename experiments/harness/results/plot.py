"""Draw learning curves: `python -m experiments.harness.results.plot --runs RUN --output FILE`.

Runs whose settings differ in the seed alone are one line: their mean, with a band from the least to
the largest value.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results import plots
from experiments.harness.results.groups import expand, group_runs
from experiments.harness.runs.run_folder import Run
from jaxformer.errors import ConfigError

_METRICS = (
    "loss",
    "validation_loss",
    "validation_bleu",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
)


@dataclass(frozen=True)
class PlotOptions:
    """Which runs, which numbers, and where the picture goes."""

    runs: tuple[str, ...] = ("runs/translation/grammar",)
    """Folders of runs, or folders with runs below them, as of a sweep."""
    metrics: tuple[str, ...] = _METRICS
    """Names in metrics.jsonl; those that no run has are left out."""
    output: str = "curves.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""


def main(options: PlotOptions) -> None:
    """Writes the picture."""
    groups = grouped(expand(options.runs), options.metrics)
    if not groups:
        raise ConfigError(
            f"no run has logged one of {', '.join(options.metrics)}: give --metrics with names "
            "that are in metrics.jsonl"
        )
    plots.learning_curves(groups).savefig(options.output)
    print(f"{', '.join(groups)}: see {options.output}")


def grouped(
    folders: Sequence[Path], metrics: Sequence[str]
) -> dict[str, dict[str, list[plots.Curve]]]:
    """Of each metric, the curves of each group of runs (see `group_runs`)."""
    found: dict[str, dict[str, list[plots.Curve]]] = defaultdict(lambda: defaultdict(list))
    for name, runs in group_runs(folders):
        for folder in runs:
            lines = Run(folder).metrics()
            for metric in metrics:
                curve = [(line["step"], line[metric]) for line in lines if metric in line]
                if curve:
                    steps, values = zip(*curve, strict=True)
                    found[metric][name].append((steps, values))
    return found


if __name__ == "__main__":
    cli.start(main, {"default": PlotOptions()}, __doc__)
