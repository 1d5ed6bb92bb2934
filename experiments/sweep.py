"""Trains variants and seeds: `python -m experiments.sweep EXPERIMENT --name NAME --vary FIELD=a,b`.

EXPERIMENT is translation, language_modelling, or the module of your own train.py; every option of
its train may follow. Each combination of values and seeds is a run, a cell of the sweep, in
runs/sweeps/NAME. The same command again resumes: it trains what is not finished. At the end the
variants are compared.
"""

import json
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments import registry
from experiments.harness import cli
from experiments.harness.cli import config_files, display
from experiments.harness.results import comparing, tables
from experiments.harness.results.run_settings import settings_of, shared_settings
from experiments.harness.results.sweep_failures import FAILED, SWEEP
from experiments.harness.runs import run_folder
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.training import named_values
from jaxformer import storage
from jaxformer.config import Checked, Count, Natural, import_by_name, to_plain
from jaxformer.errors import ConfigError, DataError
from jaxformer.records import Record

Overrides = Mapping[str, Any]
"""Dotted names of settings, such as model.d_model -> values."""
_SEED = "training.seed"
_OF_THE_SWEEP = ("name", "runs", "sweep", "text_cache_dir")
"""Settings that the sweep gives to each cell."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Checked):
    """The cells of a sweep, and the processes that train them."""

    seeds: Count = 1
    """Seeds of each variant: --training.seed and those after it."""
    vary: tuple[str, ...] = ()
    """A setting and its values, such as optimizer.learning_rate=1e-3,2e-3; several give a grid."""
    cells: str = ""
    """Your own function package.module:name that yields variants, {"model.d_model": 192} each."""
    jobs: Count = 1
    """Processes that train cells at the same time."""
    cell: tuple[Natural, ...] = ()
    """Trains the cells of these numbers alone, from 0, as a task of a job array does."""

    def __post_init__(self):
        super().__post_init__()
        if self.cell and self.jobs > 1:
            raise ConfigError(
                f"jobs={self.jobs} has no effect with --cell, whose cells are trained one after "
                "the other in this process: leave it out"
            )


def sweep(
    config: Any,
    *,
    name: str,
    vary: Mapping[str, Sequence[Any]] | None = None,
    cells: Iterable[Overrides] = ({},),
    seeds: int = 1,
    loggers: Iterable[Logger] = (),
    experiment: str = "",
    **values: Any,
) -> dict[str, TrainResult]:
    """Trains variants of the run `config`, each with `seeds` seeds, in this process.

    A variant is one of `cells`, dotted names of settings and their values, with one combination of
    the values in `vary`. `loggers` and `values` are as in `train`. `experiment` is its name or
    module (empty: the one that configs of this class belong to). Returns the results of the cells
    by their names, without failed ones; the screen says which, and `failed/` why.
    """
    module = registry.find(experiment) if experiment else registry.of_config(config)
    base = named_values.with_values(replace(config, name=name), **values)
    runs = open_cells(module, base, name_cells(base, vary or {}, cells, seeds))
    train_cells(module, runs, tuple(loggers))
    results = {run.name: result_of(module, run) for run in runs}
    return {cell: result for cell, result in results.items() if result is not None}


def name_cells(
    config: Any,
    vary: Mapping[str, Sequence[Any]],
    variants: Iterable[Overrides] = ({},),
    seeds: int = 1,
) -> dict[str, Overrides]:
    """The cells of each of `variants` with each combination of values, by their names.

    Each has `seeds` seeds, from `config`'s on; one with a seed of its own is one cell. A name
    has the last words of the settings, as in `learning_rate=0.001,seed=0`. Raises `ConfigError` for
    two cells of one name, and for `seeds` where each variant has a seed of its own.
    """
    seeded = range(config.training.seed, config.training.seed + seeds)
    grid = [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]
    made = [{**variant, **point} for variant in variants for point in grid]
    if seeds > 1 and all(_SEED in variant for variant in made):
        raise ConfigError(
            f"seeds={seeds} has no effect: each variant has a {_SEED} of its own. Leave it out"
        )
    cells = []
    for variant in to_plain(made):
        if _SEED in variant:
            cells.append(variant)
        else:
            cells += [{**variant, _SEED: seed} for seed in seeded]
    last = Counter(name.rpartition(".")[2] for name in {name for cell in cells for name in cell})
    named: dict[str, Overrides] = {}
    for cell in cells:
        short = {name: name.rpartition(".")[2] for name in cell}
        words = (f"{word if last[word] == 1 else x}={_word(cell[x])}" for x, word in short.items())
        name = ",".join(words)
        if name in named:
            raise ConfigError(f"two cells would be named {name}: give each setting once")
        named[name] = cell
    return named


def _word(value: Any) -> str:
    """`value` as a part of a folder's name."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"


def read_vary(config: Any, texts: Iterable[str]) -> dict[str, list[Any]]:
    """FIELD=a,b as a field of `config` and its values; `ConfigError` where that does not fit."""
    vary: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not (field and equals and values) or field in vary:
            raise ConfigError(f"--vary {text}: give each field once, as FIELD=VALUE,VALUE")
        vary[field] = [cli.read_option(config, field, value) for value in values.split(",")]
    return vary


def open_cells(
    experiment: ModuleType,
    config: Any,
    cells: Mapping[str, Overrides],
    typed: Collection[str] = (),
) -> list[Any]:
    """The configurations of `cells` of the run `config`, in the folder RUNS/sweeps/NAME.

    Writes sweep.json, which keeps the cells of earlier calls too. Raises `ConfigError` when it was
    made with other settings, for a cell with settings that contradict each other, and for a setting
    that changes nothing in any cell, if the cells differ in it or it is one of the `typed`.
    """
    folder = run_folder.folder_of(config.runs, "sweeps", config.name)
    texts = config.text_cache_dir  # of RUNS, as a cell in RUNS/sweeps/NAME names it
    texts = str(Path("..", "..", texts)) if texts else ""
    base = replace(config, runs=str(folder), sweep=config.name, text_cache_dir=texts)
    runs = [
        replace(config_files.with_overrides(base, changes), name=name)
        for name, changes in cells.items()
    ]
    _refuse_without_effect(config, runs, cells.values(), typed)
    record, settings = Record(folder / SWEEP), to_plain(config)
    begun = record.read() if any(folder.glob("*/*/checkpoints/[0-9]*")) else {}
    if begun:
        run_folder.refuse_differences(begun["settings"], settings, folder, config.free_fields())
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"experiment": experiment.EXPERIMENT, "settings": settings}
    record.write(facts | {"cells": begun.get("cells", {}) | dict(cells)})
    return runs


def _refuse_without_effect(
    config: Any, runs: Sequence[Any], cells: Collection[Overrides], typed: Collection[str]
) -> None:
    """Raises `ConfigError` for a setting that changes nothing in any of the `cells`, see there."""
    varied = list(dict.fromkeys(name for cell in cells for name in cell))
    for name in _OF_THE_SWEEP:
        if name in varied:
            raise ConfigError(
                f"a sweep gives each cell its {name}, so it cannot be varied: leave it out"
            )
    cli.refuse_without_effect_in_all(runs, varied, varied=True)
    if "sweep" in typed:
        raise ConfigError("--sweep has no effect: a sweep is called by its --name. Leave it out")
    for name in typed:
        is_first_seed = name == _SEED and any(x[_SEED] == config.training.seed for x in cells)
        if all(name in cell for cell in cells) and not is_first_seed:
            raise ConfigError(
                f"--{name} has no effect: each cell of the sweep has a value of its own. Leave it "
                "out"
            )
    cli.refuse_without_effect_in_all(runs, typed, varied=False)


def train_cells(experiment: ModuleType, runs: list[Any], loggers: Sequence[Logger] = ()) -> None:
    """Trains each of `runs` that is not finished, one after the other.

    An error ends its cell alone, and is written to failed/CELL.json; a signal ends all.
    """
    for number, run in enumerate(runs, start=1):
        display.say(f"\ncell {number} of {len(runs)}: {run.name}")
        failure = _failure_of(run)
        failure.path.unlink(missing_ok=True)
        if result_of(experiment, run) is not None:
            display.say("finished before")
            continue
        try:
            experiment.train(run, loggers=loggers)
        except Exception as error:
            why = {"exit_code": cli.exit_code(error), "error": cli.sentence(error)}
            failure.path.parent.mkdir(exist_ok=True)
            failure.write(why | {"traceback": "".join(traceback.format_exception(error))})
            display.say(f"failed: {why['error']}")


def result_of(experiment: ModuleType, run: Any) -> TrainResult | None:
    """The result of the cell `run`, or None until it is finished with these settings.

    A cell that was scored with another beam size or test text is not: `train` scores it again.
    """
    folder = run_folder.folder_of(run.runs, experiment.EXPERIMENT, run.name)
    parent = run.init_from or run.continue_from
    decided = ["model.", "data.tokenizer"] if parent else []  # by another run's weights
    if hasattr(run, "task"):  # a fine-tuning also writes as its start does
        decided += ["sampling.", "completion.", "search.", "translation."]

    def compared(settings: Mapping[str, str]) -> dict[str, str]:
        shared = shared_settings(settings).items()
        return {name: text for name, text in shared if not name.startswith(tuple(decided))}

    try:
        stored = compared(settings_of(folder))
        return read_result(folder) if stored == compared(config_files.flat(to_plain(run))) else None
    except (ConfigError, DataError):
        return None


def _failure_of(run: Any) -> Record:
    """The record of why the cell `run` failed, if it has."""
    return Record(storage.to_path(run.runs) / FAILED / f"{run.name}.json")


def main(args: Sequence[str]) -> None:
    """Trains the cells and compares them, or trains some cells alone."""
    experiment, config, options, typed = registry.parse(args, SweepOptions(), __doc__)
    variants = import_by_name(options.cells, "cells")() if options.cells else ({},)
    cells = name_cells(config, read_vary(config, options.vary), variants, options.seeds)
    runs = open_cells(experiment, config, cells, typed)
    missing = 0
    if options.cell:
        if max(options.cell) >= len(runs):
            last = len(runs) - 1
            raise ConfigError(f"cell={max(options.cell)}, but the sweep has cells 0 to {last}")
        runs = [runs[number] for number in options.cell]
        train_cells(experiment, runs)
    elif config.distributed or config.coordinator:
        raise ConfigError("a cell of several processes needs --cell: give the number of one")
    else:
        if options.jobs > 1:
            _run_jobs(runs, options.jobs, args)
        else:
            train_cells(experiment, runs)
        missing = _print_results(experiment, runs)
    failed = {run.name: why for run in runs if (why := _failure_of(run).read())}
    for cell, why in failed.items():
        path = f"{runs[0].runs}/{FAILED}/{cell}.json"
        print(f"error: {cell} failed: {why['error']} (traceback: {path})", file=sys.stderr)
    if failed:
        raise SystemExit(next(iter(failed.values()))["exit_code"])
    if missing:
        raise SystemExit(f"{missing} cells are not finished: see {runs[0].runs}/logs")


def _run_jobs(runs: list[Any], jobs: int, args: Sequence[str]) -> None:
    """Trains the cells in `jobs` processes, each of which has every so many."""
    folder = storage.to_path(runs[0].runs) / "logs"
    with ExitStack() as stack:
        logs = stack.enter_context(storage.written_here(folder))
        workers = []
        for job in range(min(jobs, len(runs))):
            log = stack.enter_context((logs / f"job{job}.txt").open("ab"))
            cells = map(str, range(job, len(runs), jobs))
            command = [sys.executable, "-m", "experiments.sweep", *args]
            command += ["--jobs", "1", "--cell", *cells]
            # In a session of its own, a worker gets no SIGINT of the terminal, but one SIGTERM.
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            workers.append(worker)
            stack.callback(worker.wait)  # it saves and ends, if it still runs
            stack.callback(worker.terminate)
        print(f"{len(workers)} processes train; {folder} has what they say", flush=True)
        for worker in workers:
            worker.wait()


def _print_results(experiment: ModuleType, runs: list[Any]) -> int:
    """Prints the table of the variants, and what is not finished: the number of these cells."""
    results = [result_of(experiment, run) for run in runs]
    finished = [result.folder for result in results if result is not None]
    print(f"\n{len(finished)} of {len(runs)} cells are finished")
    if len(finished) < len(runs):
        missing = (run.name for run, x in zip(runs, results, strict=True) if x is None)
        print(f"not finished: {' '.join(missing)}\nThe same command again trains them.")
    if finished:
        try:
            print(f"\n{tables.render(comparing.compare(finished))}")
        except (ConfigError, DataError) as error:
            print(f"not compared: {cli.sentence(error)}")
        print("\nNext:")
        for command in (f"page {runs[0].runs}", f"compare {runs[0].runs} --format latex"):
            print(f"  python -m experiments.runs {command}")
    return len(runs) - len(finished)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
