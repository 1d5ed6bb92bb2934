"""Lists runs: `python -m experiments.runs [FOLDER ..]`.

Prints a line for each run: its newest step, scores, first start, parent (what it started
from) and size. A sweep below a FOLDER is one line; give its own folder to list its runs.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import cli
from experiments.harness.results.groups import find_runs
from experiments.harness.results.sweeping import SWEEP
from experiments.harness.runs.run_folder import Run
from experiments.harness.training import initialization
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import DataError

_SCORES = ("bleu", "chrf", "exact", "loss", "bits_per_byte")
_VALIDATION = ("validation_bleu", "validation_loss")


@dataclass(frozen=True)
class RunsOptions:
    """Which runs are listed."""

    folders: tuple[str, ...] = ("runs",)
    """Folders that are searched for runs, at any depth."""


class Row(NamedTuple):
    """What is shown of one run."""

    run: str
    step: str
    score: str
    started: str
    parent: str
    size: str


def main(options: RunsOptions) -> None:
    """Prints a table of the runs, sorted by folder."""
    found = dict.fromkeys(
        sweep_of(run, Path(folder)) or run
        for folder in options.folders
        for run in find_runs([folder])
    )
    rows = [describe_sweep(x) if (x / SWEEP).is_file() else describe(x) for x in found]
    if not rows:
        raise DataError(f"there is no run in {', '.join(options.folders)}: train first")
    print("\n".join(table([Row(*Row._fields), *rows])))


def describe(folder: Path) -> Row:
    """What is shown of the run in `folder`; "-" for what it does not have."""
    config, environment = (_read(folder / f"{name}.json") for name in ("config", "env"))
    starts = [*environment.get("earlier", []), environment]
    steps = Checkpoints(folder / "checkpoints").steps()
    total = config.get("optimizer", {}).get("total_steps", "?")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Row(
        str(folder),
        f"{steps[-1] if steps else 0:,} of {total:,}" if isinstance(total, int) else "-",
        score_of(folder),
        str(starts[0].get("time", "-"))[:16].replace("T", " "),
        parent_of(folder, config),
        f"{size / 1e6:,.1f} MB",
    )


def parent_of(folder: Path, config: dict[str, Any]) -> str:
    """What the run started from: RUN@STEP, or a folder of `transformers`; "-" for nothing."""
    note = _read(folder / initialization.NOTE)
    if "run" in note:
        return f"{note['run']}@{','.join(map(str, note.get('steps', [])))}"
    return config.get("continue_from") or config.get("init_from") or "-"


def sweep_of(run: Path, folder: Path) -> Path | None:
    """The folder below `folder` of the sweep that the `run` is a cell of, or None."""
    above = [path for path in run.parents if folder in path.parents]
    return next((path for path in above if (path / SWEEP).is_file()), None)


def describe_sweep(folder: Path) -> Row:
    """What is shown of the sweep in `folder`; `compare` shows its scores."""
    runs = [describe(run) for run in find_runs([folder])]
    finished = len(list(folder.glob("*/*/scores.json")))
    size = sum(float(row.size.removesuffix(" MB").replace(",", "")) for row in runs)
    return Row(
        str(folder),
        f"{finished} of {len(_read(folder / SWEEP).get('cells', {}))} cells",
        "-",
        min(row.started for row in runs),
        "-",
        f"{size:,.1f} MB",
    )


def score_of(folder: Path) -> str:
    """The final scores; before the end the newest of the validation, else "-"."""
    scores = _read(folder / "scores.json")
    found = [
        f"{scores.get('text')} {name} {scores[name]:.3f}" for name in _SCORES if name in scores
    ]
    if found:
        return ", ".join(found[:2])
    lines = [line for line in Run(folder).metrics() if set(_VALIDATION) & set(line)]
    newest = lines[-1] if lines else {}
    return ", ".join(f"{name} {newest[name]:.3f}" for name in _VALIDATION if name in newest) or "-"


def table(rows: list[Row]) -> list[str]:
    """The rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _read(path: Path) -> dict[str, Any]:
    """The object in `path`, empty where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    cli.start(main, {"default": RunsOptions()}, __doc__, positional="folders")
