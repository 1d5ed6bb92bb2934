"""Lists, compares and shows runs: `python -m experiments.runs [WORD] FOLDER ..`.

  list     each run's state, steps, scores, start and parent (the default)
  compare  scores with intervals and paired tests, as text, Markdown, LaTeX, CSV
  diff     the settings in which two runs differ
  plot     learning curves, with a band over seeds
  page     an HTML page: scores, curves and samples; of one run also attention

FOLDER is of a run or of a sweep, and stands for all runs below it. Options may
stand before the word or after it; WORD --help shows them.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from experiments import registry
from experiments.harness import cli
from experiments.harness.results import pages, plots, tables
from experiments.harness.results.comparing import compare as compare_runs
from experiments.harness.results.find_runs import expand, find_runs
from experiments.harness.results.groups import group_runs
from experiments.harness.results.run_facts import RunFacts, facts_of_sweep
from experiments.harness.results.run_settings import experiment_of, settings_of
from experiments.harness.results.sweep_failures import SWEEP
from experiments.harness.results.tables import Table
from experiments.harness.results.token_units import letters_of_tokens
from experiments.harness.runs.run_options import RunOptions
from jaxformer import storage
from jaxformer.config import Checked, Natural
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import CheckpointName, is_pretrained
from jaxformer.records import Record


@dataclass(frozen=True)
class ListOptions(Checked):
    """The runs that are listed."""

    runs: tuple[str, ...] = ("runs",)
    """Folders that are searched for runs, at any depth. A sweep below one is one line."""


@dataclass(frozen=True)
class CompareOptions(Checked):
    """The runs, the metric and the form of a comparison."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them, as of a sweep."""
    metric: str = ""
    """A number of scores.json, such as bleu, chrf, exact, lowercased.bleu, loss, bits_per_byte, or
    validation_bleu or validation_loss, which chose the weights; empty: bleu, chrf, bits_per_byte
    or loss, the first that the runs have and that is not the same for all."""
    baseline: str = ""
    """The run whose group the others are compared with; empty: the first."""
    format: tables.Format = "terminal"
    """The form of the tables."""
    by_length: tuple[int, ...] = ()
    """Adds a table of translations by the words of the source, such as 10 15 20: 1 to 10, 11 to
    15, 16 to 20, and longer ones."""


@dataclass(frozen=True)
class DiffOptions(Checked):
    """The two runs."""

    runs: tuple[str, ...] = ()
    """The folders of two runs, or two .json or .toml files with settings."""


@dataclass(frozen=True)
class PlotOptions(Checked):
    """The runs, the metrics and the file of a picture."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them, as of a sweep."""
    metrics: tuple[str, ...] = (
        "loss",
        "validation_loss",
        "validation_bleu",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
    )
    """Names in metrics.jsonl; a name that no run has is left out."""
    output: str = "curves.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""


@dataclass(frozen=True)
class PageOptions(Checked):
    """The runs and the file of a page."""

    runs: tuple[str, ...] = ()
    """Folder of a run, of a model of transformers, or of a sweep; several are compared."""
    experiment: str = ""
    """The module of your own experiment, whose part the page shows; empty: known by the folder."""
    output: str = ""
    """File of the page; empty: report.html in the folder, comparison.html for several."""
    metric: str = ""
    """The score by which several runs are compared, as in `compare`."""
    baseline: str = ""
    """The run whose group the others are compared with; empty: the first."""
    text: tuple[str, ...] = ()
    """Texts whose attention is shown; empty: the run's first samples, or its prompts."""
    checkpoint: CheckpointName = "final"
    """Weights of the run: final, best, last, average or ema."""
    step: Natural | None = None
    """The step whose weights are used, if its checkpoint is kept; None: --checkpoint decides."""

    @property
    def shows_one_run(self) -> bool:
        """Whether the page is of one run, and not of several that are compared."""
        return len(self.runs) == 1 and (storage.to_path(self.runs[0]) / "config.json").is_file()

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their names."""
        if self.shows_one_run:
            return dict.fromkeys(("metric", "baseline"), "it is for pages of several runs")
        if not all(storage.to_path(run).is_dir() for run in self.runs):
            return {}  # the page is refused
        of_one = ("experiment", "text", "checkpoint", "step")
        return dict.fromkeys(of_one, "it is for the page of one run")


def list_runs(options: ListOptions) -> None:
    """Prints a line for each run and each sweep: its state, steps, scores, start and parent.

    On a terminal that is too narrow, lines. A run that never began, as its start was refused, is
    left out.
    """
    facts = {}
    for root in options.runs:
        for folder in find_runs([root]):
            sweep = _sweep_of(folder, storage.to_path(root))
            if sweep and sweep not in facts:
                facts[sweep] = facts_of_sweep(sweep)
            elif not sweep and (run := RunFacts(folder)).state:
                facts[folder] = {"score": run.newest_score() or "-"} | run.describe()
    if not facts:
        raise DataError(f"there is no run in {', '.join(options.runs)}: train first")
    titles = "state", "steps", "score", "started", "parent"
    rows = [[str(x), *(each.get(title, "-") for title in titles)] for x, each in facts.items()]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(tables.in_columns(Table(("run", *titles), rows), width))


def compare(options: CompareOptions) -> None:
    """Prints scores with intervals and paired tests.

    Runs whose settings differ in the seed alone are one row: mean, deviation and 95 % intervals of
    a score of the test text, and the difference from the first row with tests. The weights of each
    run are the ones that its validation chose.
    """
    comparison = compare_runs(options.runs, options.metric, options.baseline)
    print(tables.render(comparison, options.format))
    if options.by_length:
        table = tables.by_length(comparison, options.by_length)
        print(f"\n{tables.write(table, options.format)}")


def diff(options: DiffOptions) -> None:
    """Prints a line for each setting in which two runs differ."""
    if len(options.runs) != 2:
        raise ConfigError(f"{len(options.runs)} runs were given: give the folders of two, RUN RUN")
    a, b = (settings_of(storage.to_path(path)) for path in options.runs)
    lines = [
        f"{name}: {a.get(name, 'absent')} -> {b.get(name, 'absent')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    print("\n".join(lines) or "the settings are equal")


def plot(options: PlotOptions) -> None:
    """Draws learning curves; runs that differ in the seed alone are one line with a band.

    Losses of different tokens have different panels.
    """
    folders = expand(options.runs)
    plots.check_format(options.output)
    groups = group_runs(folders)
    logged, letters = plots.logged_curves(groups), letters_of_tokens(groups)
    curves = {metric: logged[metric] for metric in options.metrics if metric in logged}
    if not curves:
        raise ConfigError(
            f"no run has logged one of {', '.join(options.metrics)}: give --metrics with one of "
            f"{', '.join(logged)}"
        )
    plots.learning_curves(curves, letters).savefig(storage.to_path(options.output))
    if letters:
        print(plots.describe_letters(letters))
    print(f"{', '.join(curves)}: see {options.output}")


def page(options: PageOptions) -> None:
    """Writes an HTML page: scores, curves and samples; of one run also attention and settings.

    Several runs whose settings differ in the seed alone are one row and one curve.
    """
    folders = [storage.to_path(run) for run in options.runs]
    output = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    if options.shows_one_run:
        chosen = RunOptions(str(folders[0]), checkpoint=options.checkpoint, step=options.step)
        contents = _page_contents(folders[0], options.experiment)
        ready = RunFacts(folders[0]).steps or is_pretrained(folders[0])
        made = contents(folders[0], chosen, options.text) if contents and ready else None
        text = pages.run_page(folders[0], made)
    else:
        text = pages.runs_page(options.runs, options.metric, options.baseline)
    path = storage.to_path(options.output or output)
    path.write_text(text, encoding="utf-8")
    print(f"see {path} ({len(text.encode()):,} bytes)")


COMMANDS: dict[str, Callable[[Any], None]] = {
    "list": list_runs,
    "compare": compare,
    "diff": diff,
    "plot": plot,
    "page": page,
}
"""Words of the command line; the type of a function's argument has its options."""


def main(args: Sequence[str]) -> None:
    """Runs the word that `args` begin with, or `list`."""
    if args and args[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    word, words = _split_word(args)
    command = COMMANDS[word]
    options = get_type_hints(command)["options"]()
    command(cli.parse({"default": options}, words, command.__doc__, positional="runs"))


def _split_word(args: Sequence[str]) -> tuple[str, list[str]]:
    """The word of `args`, first or after options, and the other words; `list` where there is none.

    Raises `ConfigError` for a first word that is neither a word of `COMMANDS` nor a folder.
    """
    first = next(iter(args), "--")
    if first.startswith("-"):
        words = [number for number, arg in enumerate(args) if arg in COMMANDS]
    elif first in COMMANDS:
        words = [0]
    elif storage.to_path(first).exists():
        words = []
    else:
        raise ConfigError(f"{first!r} is neither a folder nor one of {', '.join(COMMANDS)}")
    if not words:
        return "list", [*args]
    return args[words[0]], [*args[: words[0]], *args[words[0] + 1 :]]


def _page_contents(folder: Path, experiment: str) -> Callable[..., pages.Contents] | None:
    """The function that makes the part of a page of `experiment` (empty: the run's folder's).

    Only a module that was typed is imported: the name of a folder is its sender's.
    """
    if experiment:
        return registry.page_contents(experiment)
    experiment = experiment_of(folder)
    if is_pretrained(folder):
        seq2seq = Record(folder / "config.json").read_if_intact().get("is_encoder_decoder")
        experiment = "translation" if seq2seq else "language_modelling"
    return registry.page_contents(experiment) if experiment in registry.NAMES else None


def _sweep_of(run: Path, folder: Path) -> Path | None:
    """The folder below `folder` of the sweep that the `run` is a cell of, or None."""
    above = [path for path in run.parents if folder in path.parents]
    return next((path for path in above if (path / SWEEP).is_file()), None)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
