"""SIGTERM at random moments of a small training, which then goes on as if nothing had been."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.translation import train
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import CompiledStep, Strategy
from tests.faults import children, trainings
from tests.faults.children import Count
from tests.faults.trainings import Tell

PROMISED = 30.0  # seconds from the signal to the end


class Phase(NamedTuple):
    """A call of `owner.name`, within which the signal shall come.

    `calls` are drawn from when there are several; where `programs` is empty nothing is compiled
    before, and the call takes as long as compiling.
    """

    owner: Any
    name: str
    calls: range
    programs: str = "programs"


PHASES = {
    "while the first state is compiled": Phase(Strategy, "init", range(1), ""),
    "while the step is compiled": Phase(CompiledStep, "__call__", range(1), ""),
    "while a step is made": Phase(CompiledStep, "__call__", range(1, 40)),
    "while evaluating": Phase(train, "evaluate", range(2)),
    "while saving": Phase(Checkpoints, "save", range(6)),
}


def at_random(folder: Path, tries: int) -> Count:
    """A training stopped `tries` times, in each phase in turn, at a random moment of it.

    It must end with 143 within 30 seconds and, once resumed, with 0, from the step that was saved,
    with the bytes of a training that was never stopped and its lines of metrics.
    """
    trainings.load_libraries()
    args = trainings.settings(folder)
    expected = trainings.completed_once(args, folder)
    lengths = {when: _length(args, folder, phase) for when, phase in PHASES.items()}
    random, outcomes = children.drawn(2), []
    for number in range(tries):
        when = list(PHASES)[number % len(PHASES)]
        phase = PHASES[when]
        share, call = random.random(), random.choice(phase.calls)
        said = _stop(args, folder / "stopped", phase, call, share * lengths[when], expected)
        outcomes.append(f"{when}, {share:.2f}: {said}" if said != "survived" else said)
        shutil.rmtree(folder / "stopped")
    return children.counted(outcomes)


def _length(args: dict, folder: Path, phase: Phase) -> float:
    """The seconds that the last of the calls of a phase takes."""
    place = folder / "measured"
    around = partial(_told, phase, phase.calls[-1])
    child = trainings.begin(args, place, around, programs=phase.programs)
    moments = []
    for line in child.told():
        if line in ("entered", "left"):
            moments.append(time.monotonic())
        if line == "left":
            child.send(signal.SIGKILL)
    if child.wait() != -signal.SIGKILL or len(moments) != 2:
        raise RuntimeError(trainings.said(place))
    shutil.rmtree(place)
    return moments[1] - moments[0]


def _stop(args: dict, place: Path, phase: Phase, call: int, after: float, expected: dict) -> str:
    """The outcome of a training stopped `after` seconds within the call number `call`."""
    child = trainings.begin(args, place, partial(_told, phase, call), programs=phase.programs)
    for line in child.told():
        if line == "entered":
            time.sleep(after)
            child.send(signal.SIGTERM)
            sent = time.monotonic()
    code, seconds = child.wait(), time.monotonic() - sent
    if code != 143 or seconds > PROMISED:
        return f"ended with {code} after {seconds:.1f} s: {trainings.said(place)}"
    saved = children.in_child(partial(_newest, place))
    if saved == 0 and phase.owner is not Strategy:
        return f"nothing was saved: {trainings.said(place)}"
    return trainings.goes_on(args, place, expected, saved)


def _newest(place: Path) -> int:
    return Checkpoints(trainings.run_of(place) / "checkpoints").newest_step() or 0


@contextmanager
def _told(phase: Phase, number: int, tell: Tell) -> Iterator[None]:
    """Tells when the call `number`, counted from 0, of a phase is entered and left."""
    inner: Callable = getattr(phase.owner, phase.name)
    calls = iter(range(number + 1))

    def call(*args: Any, **named: Any) -> Any:
        due = next(calls, None) == number
        if due:
            tell("entered")
        result = inner(*args, **named)
        if due:
            tell("left")
        return result

    setattr(phase.owner, phase.name, call)
    yield
