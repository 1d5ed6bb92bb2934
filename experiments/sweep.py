"""Trains variants and seeds: `python -m experiments.sweep EXPERIMENT --name NAME --vary FIELD=a,b`.

EXPERIMENT is translation, language_modelling, or the module of your own train.py; every option of
its train may follow. Each combination of values and seeds is a run, a cell of the sweep, in
runs/sweeps/NAME. The same command again resumes: it trains what is not finished. At the end the
variants are compared.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import registry
from experiments.harness import cli
from experiments.harness.results import comparing, sweeping, tables
from experiments.harness.results.sweeping import Sweep
from experiments.harness.runs.checkpoint_selection import TrainResult
from experiments.harness.runs.loggers import Logger
from experiments.harness.training import build
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The cells of a sweep, and the processes that train them."""

    experiment: str = ""
    """The experiment, or the module of your own; it stands first, without --experiment."""
    seeds: int = 1
    """Seeds of each variant: --training.seed and those after it."""
    vary: tuple[str, ...] = ()
    """A setting and its values, such as optimizer.learning_rate=1e-3,2e-3; several give a grid."""
    cells: str = ""
    """Your own function package.module:name that yields variants, {"model.d_model": 192} each."""
    jobs: int = 1
    """Processes that train cells at the same time, or tasks of a job array that run at once."""
    slurm: bool = False
    """Writes a SLURM job array with a task for each cell, and trains nothing."""
    cell: int | None = None
    """Trains the cell of this number alone, from 0, as a task of a job array does."""


def presets_of(name: str) -> dict[str, Any]:
    """The presets of an experiment, by its name or module, with the options of a sweep."""
    experiment = registry.find(name)
    bases, words = (SweepOptions, experiment.config), {"__doc__": "Cells, and what they share."}
    kind = make_dataclass("Sweep", [], bases=bases, namespace=words, frozen=True)
    return cli.with_options(experiment.presets, kind)


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
    opened = _open(base, trained.name, vary or {}, cells, seeds)
    sweeping.run_cells(opened, partial(trained.train, loggers=tuple(loggers)))
    results = {cell: opened.result(cell) for cell in opened.cells}
    return {cell: result for cell, result in results.items() if result is not None}


def main(options: Any) -> None:
    """Trains the cells and compares them, or writes a job array."""
    experiment = registry.find(options.experiment)
    check_at_least(options, 1, "seeds", "jobs")
    kind = experiment.config
    config = kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
    variants = cli.import_by_name(options.cells, "cells")() if options.cells else ({},)
    vary = sweeping.read_vary(config, options.vary)
    opened = _open(config, experiment.name, vary, variants, options.seeds)
    if options.slurm:
        print(_write_slurm(opened, options.jobs))
    elif options.cell is not None:
        name = _numbered(opened, options.cell)
        sweeping.run_cell(opened, name, experiment.train)
        _raise_failures(opened, [name])
    else:
        if config.distributed or config.coordinator:
            raise ConfigError("a cell of several processes needs --slurm or --cell: give one")
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


def _numbered(opened: Sweep, number: int) -> str:
    """The name of the cell `number`, from 0."""
    if not 0 <= number < len(opened.cells):
        raise ConfigError(f"cell={number}, but the sweep has cells 0 to {len(opened.cells) - 1}")
    return list(opened.cells)[number]


def _run_jobs(opened: Sweep, jobs: int) -> list[int]:
    """Trains the cells in `jobs` processes, each the next that no other has; their exit codes."""
    logs = opened.folder / "logs"
    logs.mkdir(exist_ok=True)
    for cell in opened.cells:
        opened.failure_of(cell).unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.sweep", *sys.argv[1:], "--jobs", "1"]
    with ExitStack() as stack:
        workers = []
        for job in range(min(jobs, len(opened.cells))):
            log = stack.enter_context((logs / f"job{job}.txt").open("ab"))
            # In a session of its own, a worker gets no SIGINT of the terminal, but one SIGTERM.
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            workers.append(worker)
            stack.callback(_stop, worker)
        print(f"{len(workers)} processes train; {logs} has what they say", flush=True)
        told: set[str] = set()
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.5)
            _print_news(opened, told)
    _print_news(opened, told)
    return [worker.wait() for worker in workers]


def _stop(worker: subprocess.Popen) -> None:
    """Has `worker` save and end, if it still runs."""
    worker.terminate()
    worker.wait()


def _print_news(opened: Sweep, told: set[str]) -> None:
    """Prints each cell that is finished or failed and not in `told`, and adds it."""
    failed = sweeping.failures(opened)
    for cell in opened.cells:
        state = "failed" if cell in failed else "finished" if opened.result(cell) else ""
        if state and cell not in told:
            print(f"{cell}: {state}", flush=True)
            told.add(cell)


def _write_slurm(opened: Sweep, jobs: int) -> str:
    """Writes the script of a job array; returns what to do with it."""
    path = opened.folder / "array.sbatch"
    (opened.folder / "logs").mkdir(exist_ok=True)
    args = [arg for arg in sys.argv[1:] if arg != "--slurm"]
    at_once = f"%{jobs}" if jobs > 1 else ""
    script = f"""#!/bin/sh
#SBATCH --job-name={opened.folder.name}
#SBATCH --array=0-{len(opened.cells) - 1}{at_once}
#SBATCH --output={opened.folder.absolute()}/logs/cell%a.txt
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue
cd {shlex.quote(str(Path.cwd()))}
srun {shlex.join([sys.executable, "-m", "experiments.sweep", *args])} --cell "$SLURM_ARRAY_TASK_ID"
"""
    path.write_text(script, encoding="utf-8")
    return (
        f"{path}: a job array of {len(opened.cells)} cells. Start it, with what your cluster "
        f"needs, and compare the variants at the end:\n  sbatch --time=4:00:00 {path}\n"
        f"  python -m experiments.runs compare {opened.folder}\n"
        "The same sbatch again trains what is not finished."
    )


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
        print(f"\nNext:\n  python -m experiments.runs compare {opened.folder} --format latex")


def _raise_failures(opened: Sweep, cells: Iterable[str]) -> None:
    """Ends the process with the exit code of the first of `cells` that failed, if one has."""
    failed = {cell: why for cell, why in sweeping.failures(opened).items() if cell in cells}
    for cell, failure in failed.items():
        path = opened.failure_of(cell)
        print(f"error: {cell} failed: {failure.error} (traceback: {path})", file=sys.stderr)
    if failed:
        raise SystemExit(next(iter(failed.values())).exit_code)


def _presets(args: Sequence[str]) -> Mapping[str, Any]:
    """The presets of the experiment that the first of `args` names; without `args` no run's."""
    first = next(iter(args), "--help")
    return {"default": SweepOptions()} if first in ("-h", "--help") else presets_of(first)


if __name__ == "__main__":
    cli.start(main, lambda: _presets(sys.argv[1:]), __doc__, positional="experiment")
