"""Trains variants and seeds: `python -m experiments.sweep EXPERIMENT --name NAME --vary FIELD=a,b`.

EXPERIMENT is translation, language_modelling, or the module of your own train.py; every option of
its train may follow. Each combination of values and seeds is a run, a cell of the sweep, in
runs/sweeps/NAME. The same command again resumes: it trains what is not finished. At the end the
variants are compared.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from typing import Any

from experiments import registry
from experiments.harness import cli
from experiments.harness.results import comparing, sweeping, tables
from experiments.harness.results.sweeping import Sweep
from experiments.harness.runs.checkpoint_selection import TrainResult
from experiments.harness.runs.loggers import Logger
from experiments.harness.training import build
from jaxformer import storage
from jaxformer.config import Checked, Count, Natural, import_by_name
from jaxformer.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Checked):
    """The cells of a sweep, and the processes that train them."""

    experiment: str = ""
    """The experiment, or the module of your own; it stands first, without --experiment."""
    seeds: Count = 1
    """Seeds of each variant: --training.seed and those after it."""
    vary: tuple[str, ...] = ()
    """A setting and its values, such as optimizer.learning_rate=1e-3,2e-3; several give a grid."""
    cells: str = ""
    """Your own function package.module:name that yields variants, {"model.d_model": 192} each."""
    jobs: Count = 1
    """Processes that train cells at the same time."""
    cell: Natural | None = None
    """Trains the cell of this number alone, from 0, as a task of a job array does."""


def presets_of(name: str) -> dict[str, Any]:
    """The presets of an experiment, by its name or module, with the options of a sweep."""
    experiment = registry.find(name)
    bases = SweepOptions, registry.config_class(experiment)
    words = {"__doc__": "Cells, and what they share."}
    kind = make_dataclass("Sweep", [], bases=bases, namespace=words, frozen=True)
    return cli.with_options(experiment.PRESETS, kind)


def sweep(
    config: Any,
    *,
    name: str,
    vary: Mapping[str, Sequence[Any]] | None = None,
    cells: Iterable[Mapping[str, Any]] = ({},),
    seeds: int = 1,
    loggers: Iterable[Logger] = (),
    experiment: str = "",
    **values: Any,
) -> dict[str, TrainResult]:
    """Trains variants of the run `config`, each with `seeds` seeds, in this process.

    A variant is one of `cells`, dotted names of settings and their values, with one combination of
    the values in `vary`. `loggers` and `values` are those of `train`. `experiment` is its name or
    module (empty: the one that configs of this class belong to). Returns the results of the cells
    by their names, without those that failed; the screen says which, and `failed/` why.
    """
    trained = registry.find(experiment) if experiment else registry.of_config(config)
    base = build.with_values(replace(config, name=name), **values)
    opened = _open(base, trained.EXPERIMENT, vary or {}, cells, seeds)
    sweeping.run_cells(opened, partial(trained.train, loggers=tuple(loggers)))
    results = {cell: opened.result(cell) for cell in opened.cells}
    return {cell: result for cell, result in results.items() if result is not None}


def open_cells(options: Any) -> Sweep:
    """The sweep of the command with `options`, created or opened again."""
    experiment = registry.find(options.experiment)
    kind = registry.config_class(experiment)
    config = kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
    variants = import_by_name(options.cells, "cells")() if options.cells else ({},)
    vary = sweeping.read_vary(config, options.vary)
    return _open(config, experiment.EXPERIMENT, vary, variants, options.seeds)


def main(options: Any) -> None:
    """Trains the cells and compares them, or trains one cell."""
    opened, experiment = open_cells(options), registry.find(options.experiment)
    if options.cell is not None:
        names = list(opened.cells)
        if not 0 <= options.cell < len(names):
            raise ConfigError(f"cell={options.cell}, but the sweep has cells 0 to {len(names) - 1}")
        sweeping.run_cell(opened, names[options.cell], experiment.train)
        _raise_failures(opened, [names[options.cell]])
        return
    if options.distributed or options.coordinator:
        raise ConfigError("a cell of several processes needs --cell: give the number of one")
    codes = []
    if options.jobs > 1:
        codes = _run_jobs(opened, options.jobs)
    else:
        sweeping.run_cells(opened, experiment.train)
    _print_results(opened)
    _raise_failures(opened, opened.cells)
    if any(codes):
        raise SystemExit(f"processes ended with codes {codes}: see {opened.folder / 'logs'}")


def _open(
    config: Any,
    experiment: str,
    vary: Mapping[str, Sequence[Any]],
    variants: Iterable[Mapping[str, Any]],
    seeds: int,
) -> Sweep:
    combined = ({**variant, **point} for variant in variants for point in sweeping.grid(vary))
    return sweeping.open_sweep(config, experiment, sweeping.name_cells(config, combined, seeds))


def _run_jobs(opened: Sweep, jobs: int) -> list[int]:
    """Trains the cells in `jobs` processes, each the next that no other has; their exit codes."""
    folder = opened.folder / "logs"
    command = [sys.executable, "-m", "experiments.sweep", *sys.argv[1:], "--jobs", "1"]
    with ExitStack() as stack:
        logs, workers = stack.enter_context(storage.written_here(folder)), []
        for job in range(min(jobs, len(opened.cells))):
            log = stack.enter_context((logs / f"job{job}.txt").open("ab"))
            # In a session of its own, a worker gets no SIGINT of the terminal, but one SIGTERM.
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            workers.append(worker)
            stack.callback(worker.wait)  # it saves and ends, if it still runs
            stack.callback(worker.terminate)
        print(f"{len(workers)} processes train; {folder} has what they say", flush=True)
        return [worker.wait() for worker in workers]


def _print_results(opened: Sweep) -> None:
    """Prints the table of the variants, and what is not finished."""
    missing = [cell for cell in opened.cells if opened.result(cell) is None]
    print(f"\n{len(opened.cells) - len(missing)} of {len(opened.cells)} cells are finished")
    if missing:
        print(f"not finished: {' '.join(missing)}\nThe same command again trains them.")
    if len(missing) < len(opened.cells):
        try:
            finished = [opened.folder_of(cell) for cell in opened.cells if cell not in missing]
            print(f"\n{tables.render(comparing.compare(finished))}")
        except (ConfigError, DataError) as error:
            print(f"not compared: {cli.sentence(error)}")
        print("\nNext:")
        for command in (f"page {opened.folder}", f"compare {opened.folder} --format latex"):
            print(f"  python -m experiments.runs {command}")


def _raise_failures(opened: Sweep, cells: Iterable[str]) -> None:
    """Ends the process with the exit code of the first of `cells` that failed, if one has."""
    failed = {cell: why for cell, why in sweeping.failures(opened).items() if cell in cells}
    for cell, failure in failed.items():
        path = opened.failure_of(cell)
        print(f"error: {cell} failed: {failure['error']} (traceback: {path})", file=sys.stderr)
    if failed:
        raise SystemExit(next(iter(failed.values()))["exit_code"])


def _presets(args: Sequence[str]) -> Mapping[str, Any]:
    """The presets of the experiment that `args` name; without `args` no run's."""
    first = registry.named_in(args)
    return {"default": SweepOptions()} if first in ("-h", "--help") else presets_of(first)


if __name__ == "__main__":
    cli.start(main, lambda: _presets(sys.argv[1:]), __doc__, positional="experiment")
