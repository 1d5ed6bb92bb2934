"""A long training, watched: memory, files, threads, and what is compiled."""

import collections
import gc
import logging
import os
import re
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments.harness.training.progress import Progress
from jaxformer.checkpoint import Checkpoints
from tests.faults import children, trainings
from tests.faults.children import Count
from tests.faults.trainings import Tell

SAVES, EVALUATIONS = 100, 50
WARM = 0.2  # the share of the steps after which nothing may grow
GROWTH = 10_000_000  # bytes
THREADS = 5  # each save has some of its own for a moment
BUCKETS = 2


def watched(folder: Path, steps: int) -> Count:
    """`steps` steps with 100 saves and 50 evaluations, of which four things are promised.

    After the first fifth, and between saves, resident memory grows by less than 10 MB, no more
    files are open, and at most four more threads run; and no program is compiled twice, the step
    once for each shape of batch.
    """
    trainings.load_libraries()
    args = trainings.settings(folder) | {
        "--optimizer.total_steps": steps,
        "--training.save_every": steps // SAVES,
        "--training.evaluate_every": steps // EVALUATIONS,
        "--training.log_every": 10,
        "--data.buckets": BUCKETS,
        "--data.batch_tokens": 64,
        "--training.eval_beam_size": 2,  # that of the final score: one program for both
    }
    child = trainings.begin(args, folder / "long", partial(_watching, steps // SAVES))
    told = [line for line in child.told() if line != "begun"]
    if child.wait() != 0:
        raise RuntimeError(trainings.said(folder / "long"))
    *samples, compiled = told
    return children.counted(judge(samples, compiled, steps))


def judge(samples: list[dict], compiled: dict[str, int], steps: int) -> list[str]:
    """The outcome of each promise.

    `samples`: step, memory, files and threads, in order; `compiled`: how often each program was.
    """
    early = [sample for sample in samples if sample["step"] <= WARM * steps]
    late = [sample for sample in samples if sample["step"] > WARM * steps]
    outcomes = []
    for name, allowed in (("memory", GROWTH), ("files", 1), ("threads", THREADS)):
        before = early[-1][name] if name == "memory" else max(each[name] for each in early)
        after = max(sample[name] for sample in late)
        grown = after - before
        outcomes.append("survived" if grown < allowed else f"{name}: {before:,} grew to {after:,}")
    twice = {name: times for name, times in compiled.items() if times > 1}
    of_step = sum(name.startswith("step ") for name in compiled)
    right = not twice and of_step == BUCKETS
    said = f"{of_step} steps compiled, more than once: {str(twice)[:200]}"
    outcomes.append("survived" if right else said)
    return outcomes


@contextmanager
def _watching(every: int, tell: Tell) -> Iterator[None]:
    """Tells of this process midway between two saves, and in the end what it has compiled."""
    add, save, compiled = Progress.add, Checkpoints.save, collections.Counter()
    saving = []

    def save_and_note(self: Checkpoints, *args: Any, **named: Any) -> None:
        save(self, *args, **named)
        saving[:] = [self._committing]

    def add_and_look(self: Progress, step: int, *rest: Any) -> None:
        add(self, step, *rest)
        if step % every == every // 2:
            futures.wait(saving)
            tell({"step": step, **_of_this_process()})

    Progress.add, Checkpoints.save = add_and_look, save_and_note
    with _heard("jax._src.interpreters.pxla", compiled):
        yield
    tell(compiled)


@contextmanager
def _heard(logger: str, compiled: collections.Counter) -> Iterator[None]:
    """Counts the programs, each with its shapes, that JAX says it compiles."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found = re.match(r"Compiling jit\((.*?)\) with global shapes", record.getMessage())
            if found:
                compiled[f"{found[1]} {record.getMessage()}"] += 1

    listener = Listener()
    logging.getLogger(logger).addHandler(listener)
    jax.config.update("jax_log_compiles", True)
    yield
    jax.config.update("jax_log_compiles", False)
    logging.getLogger(logger).removeHandler(listener)


def _of_this_process() -> dict[str, int]:
    """Resident bytes, open files and threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gc.collect()  # an event loop of orbax holds its files until then
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
