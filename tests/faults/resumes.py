"""A training stopped at five chosen points, each resumed by a new process."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness.training.progress import Progress
from jaxformer.distributed import CompiledStep
from tests.faults import children, trainings
from tests.faults.children import Count
from tests.faults.trainings import Around, Tell

EPOCH = 7  # steps, in two epochs of batches of 16 pairs in two accumulated parts
POINTS = {
    "in the middle of an epoch": 3,
    "after a step that is neither logged nor saved": 11,
    "at the end of an epoch": EPOCH,
    "at the first step of the next epoch": EPOCH + 1,
}
WHILE_COMPUTED = 13  # the number of a step during which a signal comes
CHANGES = {
    "--optimizer.total_steps": 2 * EPOCH,
    "--training.grad_accumulation": 2,
    "--training.ema_decay": 0.9,
    "--training.save_every": 5,
    "--training.evaluate_every": 6,
    "--data.batch_size_multiple": 4,
}


def at_points(folder: Path) -> Count:
    """Stopped after four chosen steps, and while the parts of a fifth are accumulated.

    Dropout, accumulation, a moving average and two epochs of shuffled pairs are on. The resumed
    training must go on at that step, and leave the bytes of one that was never stopped: of
    parameters, optimizer, average, random state and data position, and the same lines of metrics.
    """
    trainings.load_libraries()
    args = trainings.settings(folder) | CHANGES
    expected = trainings.completed(args, folder / "whole")
    if f"{EPOCH} batches an epoch" not in trainings.said(folder / "whole"):
        raise RuntimeError(trainings.said(folder / "whole"))
    stops: list[tuple[str, int, Around]] = [
        (when, step, partial(_after, step)) for when, step in POINTS.items()
    ]
    stops.append(("while a step is computed", WHILE_COMPUTED, partial(_during, WHILE_COMPUTED)))
    outcomes = []
    for when, step, around in stops:
        said = resumed(args, folder / "stopped", around, expected, step)
        outcomes.append(f"{when}: {said}" if said != "survived" else said)
        shutil.rmtree(folder / "stopped")
    return children.counted(outcomes)


def resumed(args: dict, place: Path, around: Around, expected: dict, step: int) -> str:
    """The outcome of a training that is stopped within `around` after `step`, and resumed."""
    code = trainings.ended(args, place, around)
    if code != 143:
        return f"ended with {code}: {trainings.said(place)}"
    return trainings.goes_on(args, place, expected, step)


@contextmanager
def _after(last: int, tell: Tell) -> Iterator[None]:
    """A signal between the step `last` and the next."""
    add = Progress.add

    def add_and_stop(self: Progress, step: int, *rest: Any) -> None:
        add(self, step, *rest)
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    Progress.add = add_and_stop
    yield


@contextmanager
def _during(number: int, tell: Tell) -> Iterator[None]:
    """A signal from another thread while the step `number` is dispatched and computed."""
    call, calls = CompiledStep.__call__, iter(range(1, number + 1))

    def call_and_stop(self: CompiledStep, *args: Any) -> Any:
        is_step = hasattr(args[0], "opt_state")  # and no evaluation
        if not is_step or next(calls, None) != number:
            return call(self, *args)
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        sender.start()
        result = call(self, *args)
        sender.join()
        return result

    CompiledStep.__call__ = call_and_stop
    yield
