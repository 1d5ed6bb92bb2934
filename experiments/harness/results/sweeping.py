"""Sweeps: runs that differ in a few settings and in their seeds, the cells, in one folder."""

import itertools
import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from experiments.harness.results.groups import settings_of, shared_settings
from experiments.harness.runs import run_folder
from experiments.harness.runs.checkpoint_selection import TrainResult, read_result
from experiments.harness.runs.run_files import Record
from jaxformer.checkpoint.lock import lock
from jaxformer.config import from_plain, plain, to_plain
from jaxformer.errors import ConfigError

Overrides = dict[str, Any]
"""Dotted names of settings, such as model.d_model -> plain JSON values."""
Train = Callable[[Any], TrainResult]

SWEEP = "sweep.json"
"""The file in a sweep's folder that says what its cells are."""
_SEED = "training.seed"


class Sweep(NamedTuple):
    """The folder RUNS/sweeps/NAME, and the configuration of each cell by its name."""

    folder: Path
    experiment: str
    cells: dict[str, Any]

    def folder_of(self, cell: str) -> Path:
        """The folder of the run that is the `cell`."""
        return run_folder.folder_of(self.folder, self.experiment, cell)

    def failure_of(self, cell: str) -> Path:
        """The file that says why the `cell` failed, if it has."""
        return self.folder / "failed" / f"{cell}.json"

    def result(self, cell: str) -> TrainResult | None:
        """The result of the `cell`, or None until it is finished with the settings of this call.

        A cell that was scored with another beam size or test text is not: `train` scores it again.
        """
        folder = self.folder_of(cell)
        wanted = shared_settings(config_files.flat(to_plain(self.cells[cell])))
        try:
            return read_result(folder) if shared_settings(settings_of(folder)) == wanted else None
        except ConfigError:
            return None


def grid(vary: Mapping[str, Sequence[Any]]) -> Iterator[Overrides]:
    """Each combination of the values of each setting; `ConfigError` for what is no list."""
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ConfigError(f"{name} is to vary over {values!r}: give a list of its values")
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def read_vary(config: Any, texts: Iterable[str]) -> dict[str, list[Any]]:
    """FIELD=a,b as a field of `config` and its values; `ConfigError` where that does not fit."""
    vary: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not (field and equals and values) or field in vary:
            raise ConfigError(f"--vary {text}: give each field once, as FIELD=VALUE,VALUE")
        kind = _type_of(config, field)
        vary[field] = [_read(kind, field, value) for value in values.split(",")]
    return vary


def name_cells(
    config: Any, variants: Iterable[Mapping[str, Any]], seeds: int
) -> dict[str, Overrides]:
    """The cells of `variants` with `seeds` seeds each, from that of `config` on, by their names.

    A variant with a seed of its own is one cell. A name has the last words of the settings, as in
    `learning_rate=0.001,seed=0`. Raises `ConfigError` for an unknown setting and for two cells of
    one name.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise ConfigError(
            f"seeds={seeds!r}, but it must be the number of seeds: for certain ones vary {_SEED}"
        )
    first = config.training.seed
    cells: list[Overrides] = [
        {**variant, _SEED: seed}
        for variant in to_plain(list(variants))
        for seed in ([variant[_SEED]] if _SEED in variant else range(first, first + seeds))
    ]
    fields = dict.fromkeys(field for cell in cells for field in cell)
    for field in fields:
        _type_of(config, field)
    last = Counter(field.rpartition(".")[2] for field in fields)
    short = {f: w if last[w := f.rpartition(".")[2]] == 1 else f for f in fields}
    named: dict[str, Overrides] = {}
    for cell in cells:
        name = ",".join(f"{short[field]}={_word(value)}" for field, value in cell.items())
        if name in named:
            raise ConfigError(f"two cells would be named {name}: give each setting once")
        named[name] = cell
    return named


def open_sweep(config: Any, experiment: str, cells: Mapping[str, Overrides]) -> Sweep:
    """The sweep RUNS/sweeps/NAME with `cells` of the run `config`, created or opened again.

    Writes sweep.json, which keeps the cells of earlier calls too. Raises `ConfigError` when it was
    made with other settings, and for a cell with settings that contradict each other.
    """
    folder = run_folder.folder_of(config.runs, "sweeps", config.name)
    texts = config.text_cache_dir  # of RUNS, as a cell in RUNS/sweeps/NAME names it
    texts = str(Path("..", "..", texts)) if texts else ""
    base = replace(config, runs=str(folder), sweep=config.name, text_cache_dir=texts)
    configs = {
        name: replace(config_files.with_overrides(base, overrides), name=name)
        for name, overrides in cells.items()
    }
    record, settings = Record(folder / SWEEP), to_plain(config)
    before = record.read()
    stored = before if any(folder.glob("*/*/checkpoints/[0-9]*")) else {}
    if stored:
        run_folder.refuse_differences(stored["settings"], settings, folder, config.free_fields())
    content = {
        "experiment": experiment,
        "settings": settings,
        "cells": stored.get("cells", {}) | dict(cells),
    }
    if content != before:  # several processes open a sweep, and the first one has written it
        folder.mkdir(parents=True, exist_ok=True)
        record.write(content)
    return Sweep(folder, experiment, configs)


def run_cells(sweep: Sweep, train: Train) -> None:
    """Trains the cells that are not finished, one after the other.

    A cell that another process trains is left to it. An error ends its cell alone, and is written
    to failed/CELL.json; a signal ends all.
    """
    for number, cell in enumerate(sweep.cells, start=1):
        display.say(f"\ncell {number} of {len(sweep.cells)}: {cell}")
        try:
            held = lock(sweep.folder_of(cell))
        except ConfigError:
            display.say("another process trains it")
            continue
        with closing(held):
            run_cell(sweep, cell, train)


def run_cell(sweep: Sweep, cell: str, train: Train) -> None:
    """Trains `cell`, unless it is finished."""
    path = sweep.failure_of(cell)
    path.unlink(missing_ok=True)
    if sweep.result(cell) is not None:
        display.say("finished before")
        return
    try:
        train(sweep.cells[cell])
    except Exception as error:
        said, lines = cli.sentence(error), traceback.format_exception(error)
        failure = {"exit_code": cli.exit_code(error), "error": said, "traceback": "".join(lines)}
        path.parent.mkdir(exist_ok=True)
        Record(path).write(failure)
        display.say(f"failed: {said}")


def failures(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """`exit_code`, `error` and `traceback` of each cell that failed."""
    failed = {name: Record(sweep.failure_of(name)).read() for name in sweep.cells}
    return {name: failure for name, failure in failed.items() if failure}


def _type_of(config: Any, field: str) -> Any:
    """The type of the setting `field` of `config`; `ConfigError` where there is none."""
    known = config_files.settings(config)
    if field not in known:
        last = field.rpartition(".")[2]
        near = [name for name in known if name.rpartition(".")[2] == last or field in name]
        raise ConfigError(
            f"there is no setting {field}: give one such as {', '.join(near[:3] or [*known][:3])}, "
            "as --help all of train lists them"
        )
    return known[field]


def _read(kind: Any, field: str, text: str) -> Any:
    """`text` as a value of the type `kind`, in plain JSON; a part by its name."""
    if plain.part_kinds(kind):
        from_plain(kind, text, field)  # refuses an unknown name
        return text
    return to_plain(config_files.from_words(kind, [text], field), kind)


def _word(value: Any) -> str:
    """`value` as a part of a folder's name."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"
