"""Runs every injection and writes the counts: `python -m tests.faults [--full] [--out FILE]`."""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer import optional_dependencies
from tests.faults import (
    damage,
    files,
    folders,
    kills,
    mutations,
    nonfinite,
    shortages,
    soak,
    stops,
)
from tests.faults.children import Count


class Fault(NamedTuple):
    """An injection: its name, what counts its tries in an empty folder, and further arguments.

    `short` and `full` are those of the two forms; where `short` is None it has no short form.
    """

    name: str
    count: Callable[..., Count]
    short: tuple[Any, ...] | None = None
    full: tuple[Any, ...] = ()


FAULTS = (
    Fault("F1 kill -9 at a random moment of asynchronous saving", kills.at_random, (6,), (100,)),
    Fault(
        "F2 every file of the newest checkpoint damaged in 8 ways", damage.every_file, (3,), (1,)
    ),
    Fault(
        "F3 kill -9 before, in and after committing, and while an old step is removed",
        kills.at_a_point,
        short=(1,),
        full=(10,),
    ),
    Fault("F4 stopped at 5 points of two epochs, resumed", stops.at_points),
    Fault(
        "F4 SIGTERM at a random moment of compiling, stepping, evaluating or saving, resumed",
        stops.at_random,
        full=(20,),
    ),
    Fault("F5 the disk is full while saving", folders.full_disk, short=()),
    Fault("F5 the disk is full for 1, 2 or all saves of a training", shortages.disk),
    Fault("F5 a step finds no memory", shortages.memory),
    Fault(
        "F6 NaN, inf and -inf in loss, gradient or input, at 4 steps, 1, 3 or 9 in a row",
        nonfinite.grid,
        short=("whole",),
        full=("whole", "accumulated", "devices"),
    ),
    Fault(
        "F7 noise, a cut or a flipped bit in a small file of a run", files.damaged, (32,), (200,)
    ),
    Fault("F8 a process of two, or their coordinator, killed, both resumed", stops.of_two),
    Fault("F9 another model, optimizer or state on resume", mutations.states),
    Fault("F9 another setting, edited text or tokenizer on resume", mutations.settings),
    Fault("F14 the best evaluation lies between two saves, also killed there", stops.best),
    Fault("F14 a validation that is not finite", shortages.not_finite),
    Fault("F14 a step that weights.json names is gone", shortages.gone),
    Fault("F14 a model larger than the memory", shortages.too_large),
    Fault("F10 hostile manifests", damage.hostile, short=()),
    Fault(
        "F11 compiled programs in the cache cut short or overwritten", shortages.cache, full=(5,)
    ),
    Fault("F11 a soak of 5,000 steps, 100 saves and 50 evaluations", soak.watched, full=(5_000,)),
    Fault(
        "F13 kill -9 at a random moment of a training in a bucket, resumed",
        stops.in_a_bucket,
        full=(20,),
    ),
    Fault("F12 the clock goes back while training", shortages.clock),
    Fault(
        "F12 two runs in a folder, a read-only folder, a folder removed while running",
        folders.misused,
        short=(),
    ),
    Fault(
        "F13 kill -9 at a random moment of saving to a bucket, or of removing from it",
        folders.in_a_bucket(kills.at_random),
        full=(10,),
    ),
    Fault(
        "F13 every object of the newest checkpoint in a bucket damaged in 8 ways",
        folders.in_a_bucket(damage.every_file),
        full=(4,),
    ),
)


ROOM = 2 << 30  # bytes that all injections stay below
AT_ONCE = 2  # each waits for disks and for the ends of processes


def run(pool: Executor, *, full: bool, only: str = "") -> Iterable[dict]:
    """The row of each fault whose name holds `only`; `pool` says where, and how many at a time.

    A row: the name, tries, those survived, those silently wrong, seconds by the clock and of
    processors.
    """
    form = "full" if full else "short"
    chosen = [
        number
        for number, fault in enumerate(FAULTS)
        if only in fault.name and getattr(fault, form) is not None
    ]
    if any("bucket" in FAULTS[number].name for number in chosen):
        optional_dependencies.load("gcsfs")
    with tempfile.TemporaryDirectory(dir=_place()) as root:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            rows = pool.map(partial(_row, Path(root), form), chosen)
        yield from rows


def _row(root: Path, form: str, number: int) -> dict:
    began, used = time.monotonic(), _processor_seconds()
    folder = root / str(number)
    folder.mkdir()
    found = FAULTS[number].count(folder, *getattr(FAULTS[number], form))
    shutil.rmtree(folder)
    seconds = round(time.monotonic() - began, 1)
    used = round(_processor_seconds() - used, 1)
    row = {"fault": FAULTS[number].name, **found._asdict()}
    return row | {"seconds": seconds, "processor_seconds": used}


def _place() -> str | None:
    """A file system in memory where there is one: each save waits for the disk a hundred times."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    return str(memory) if room > ROOM and os.access(memory, os.W_OK) else None


def _processor_seconds() -> float:
    """The processor time of this process and all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    """0 if every try was survived, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all tries, in under ten minutes")
    parser.add_argument("--only", default="", help="a part of the names of those to run")
    parser.add_argument("--out", default="faults.json", help="where the counts are written")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    # Forked, as children are: from a process that has imported all and started nothing.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(AT_ONCE, mp_context=context) as pool:
        for row in run(pool, full=options.full, only=options.only):
            rows.append(row)
            counts = f"{row['survived']:4} of {row['tries']:4}  silent {row['silent']}"
            times = f"{row['seconds']:6.1f} s  {row['processor_seconds']:6.1f} s of processors"
            print(f"{counts}  {times}  {row['fault']}", flush=True)
    Path(options.out).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["survived"] < row["tries"] or row["silent"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
