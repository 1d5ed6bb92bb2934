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
from tests.faults import children
from tests.faults.children import Count
from tests.faults.trainings import Tell, Training, said

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
    changes = {
        "--optimizer.total_steps": steps,
        "--training.save_every": steps // SAVES,
        "--training.evaluate_every": steps // EVALUATIONS,
        "--training.log_every": 10,
        "--data.buckets": BUCKETS,
        "--data.batch_tokens": 64,
        "--training.eval_beam_size": 2,  # that of the final score: one program for both
    }
    place = folder / "long"
    [child] = Training(folder, changes).begin(place, partial(_watching, steps // SAVES))
    told = list(child.told())
    if child.wait() != 0:
        raise RuntimeError(said(place))
    *samples, compiled = told
    return children.counted(enumerate(judge(samples, compiled, steps)))


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
    wrong = f"{of_step} steps compiled, more than once: {str(twice)[:200]}"
    outcomes.append("survived" if right else wrong)
    return outcomes


@contextmanager
def _watching(every: int, tell: Tell) -> Iterator[None]:
    """Tells of this process midway between two saves, and in the end what it has compiled."""
    compiled: collections.Counter = collections.Counter()
    saving: list[futures.Future] = []

    def save(_: int, checkpoints: Checkpoints, *args: Any) -> Iterator[None]:
        yield
        saving[:] = [checkpoints._committing]

    def add(_: int, progress: Progress, step: int, *args: Any) -> Iterator[None]:
        yield
        if step % every == every // 2:
            futures.wait(saving)
            tell({"step": step, **_of_this_process()})

    with (
        children.in_calls(Progress, "add", add),
        children.in_calls(Checkpoints, "save", save),
        _heard("jax._src.interpreters.pxla", compiled),
    ):
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
