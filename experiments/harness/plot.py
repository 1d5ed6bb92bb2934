"""Draw learning curves: `python -m experiments.harness.plot --runs RUN RUN --output curves.svg`.

Runs whose settings differ in the seed alone are one line: their mean, with a band from the least to
the largest value.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli, plots
from experiments.harness.config_files import flat
from experiments.harness.run_folder import Run
from jaxformer.errors import ConfigError

_FREE = ("name", "runs", "training.seed")
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
    """Folders of runs."""
    metrics: tuple[str, ...] = _METRICS
    """Names in metrics.jsonl; those that no run has are left out."""
    output: str = "curves.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""


def main(options: PlotOptions) -> None:
    """Writes the picture."""
    groups = grouped([Path(run) for run in options.runs], options.metrics)
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
    """Of each metric, the curves of each group of runs; a group has the name of its first run."""
    names: dict[str, str] = {}
    found: dict[str, dict[str, list[plots.Curve]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        name = names.setdefault(_settings(folder), folder.name)
        lines = Run(folder).metrics()
        for metric in metrics:
            curve = [(line["step"], line[metric]) for line in lines if metric in line]
            if curve:
                steps, values = zip(*curve, strict=True)
                found[metric][name].append((steps, values))
    return found


def _settings(folder: Path) -> str:
    """The settings of a run other than its name and seed, as text."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    settings = flat(json.loads(path.read_text(encoding="utf-8")))
    return json.dumps({k: v for k, v in settings.items() if k not in _FREE}, sort_keys=True)


if __name__ == "__main__":
    cli.start(main, {"default": PlotOptions()}, __doc__)
