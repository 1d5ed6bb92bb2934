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
from typing import NamedTuple

from jaxformer import optional_dependencies
from tests.faults import (
    bucket_trainings,
    choices,
    damage,
    files,
    folders,
    kills,
    mutations,
    nonfinite,
    peers,
    remote,
    resumes,
    shortages,
    signals,
    soak,
)
from tests.faults.children import Count


class Fault(NamedTuple):
    """An injection: what it is, and what counts its tries in the short and in the full form.

    Each takes an empty folder of its own; None leaves the injection out of that form.
    """

    name: str
    short: Callable[[Path], Count] | None
    full: Callable[[Path], Count]
    packages: tuple[str, ...] = ()
    """Those of extras that it needs."""


FAULTS = (
    Fault(
        "F1 kill -9 at a random moment of asynchronous saving",
        lambda folder: kills.at_random(folder, 6),
        lambda folder: kills.at_random(folder, 100),
    ),
    Fault(
        "F2 every file of the newest checkpoint damaged in 8 ways",
        lambda folder: damage.every_file(folder, every=3),
        lambda folder: damage.every_file(folder, every=1),
    ),
    Fault(
        "F3 kill -9 before, in and after committing, and while an old step is removed",
        lambda folder: kills.at_a_point(folder, 1),
        lambda folder: kills.at_a_point(folder, 10),
    ),
    Fault("F4 stopped at 5 points of two epochs, resumed", None, resumes.at_points),
    Fault(
        "F4 SIGTERM at a random moment of compiling, stepping, evaluating or saving, resumed",
        None,
        lambda folder: signals.at_random(folder, 20),
    ),
    Fault("F5 the disk is full while saving", folders.full_disk, folders.full_disk),
    Fault("F5 the disk is full for 1, 2 or all saves of a training", None, shortages.disk),
    Fault("F5 a step finds no memory", None, shortages.memory),
    Fault(
        "F6 NaN, inf and -inf in loss, gradient or input, at 4 steps, 1, 3 or 9 in a row",
        lambda folder: nonfinite.grid(("whole",)),
        lambda folder: nonfinite.grid(("whole", "accumulated", "devices")),
    ),
    Fault(
        "F7 noise, a cut or a flipped bit in a small file of a run",
        lambda folder: files.damaged(folder, 32),
        lambda folder: files.damaged(folder, 200),
    ),
    Fault(
        "F8 a process of two, or their coordinator, killed, both resumed",
        None,
        lambda folder: peers.killed(folder, len(peers.KILLS)),
    ),
    Fault("F9 another model, optimizer or state on resume", None, mutations.states),
    Fault(
        "F9 another setting, edited text or tokenizer on resume",
        None,
        mutations.settings,
    ),
    Fault("F14 the best evaluation lies between two saves, also killed there", None, choices.best),
    Fault("F14 a validation that is not finite", None, choices.not_finite),
    Fault("F14 a step that weights.json names is gone", None, choices.gone),
    Fault("F14 a model larger than the memory", None, choices.too_large),
    Fault("F10 hostile manifests", damage.hostile, damage.hostile),
    Fault(
        "F11 compiled programs in the cache cut short or overwritten",
        None,
        lambda folder: shortages.cache(folder, 5),
    ),
    Fault(
        "F11 a soak of 5,000 steps, 100 saves and 50 evaluations",
        None,
        lambda folder: soak.watched(folder, 5_000),
    ),
    Fault(
        "F13 kill -9 at a random moment of a training in a bucket, resumed",
        None,
        lambda folder: bucket_trainings.killed(folder, 20),
        bucket_trainings.PACKAGES,
    ),
    Fault("F12 the clock goes back while training", None, shortages.clock),
    Fault(
        "F12 two runs in a folder, a read-only folder, a folder removed while running",
        folders.misused,
        folders.misused,
    ),
    Fault(
        "F13 kill -9 at a random moment of saving to a bucket, or of removing from it",
        None,
        lambda _: remote.killed(10),
    ),
    Fault(
        "F13 every object of the newest checkpoint in a bucket damaged in 8 ways",
        None,
        lambda _: remote.damaged(every=4),
    ),
    Fault("F13 one of 10 requests to a bucket fails or is slow", None, lambda _: remote.troubled()),
    Fault(
        "F13 two runs in a bucket, a run taken over, a read-only bucket, none of the name",
        None,
        lambda _: remote.misused(),
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
    for name in {name for number in chosen for name in FAULTS[number].packages}:
        optional_dependencies.load(name)
    with tempfile.TemporaryDirectory(dir=_place()) as root:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            rows = pool.map(partial(_row, Path(root), form), chosen)
        yield from rows


def _row(root: Path, form: str, number: int) -> dict:
    began, used = time.monotonic(), _processor_seconds()
    folder = root / str(number)
    folder.mkdir()
    found = getattr(FAULTS[number], form)(folder)
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
