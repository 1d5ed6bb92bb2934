"""Trainings that a signal ends at chosen or random moments, which go on as if nothing had been."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.training.progress import Progress
from experiments.translation import train
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import CompiledStep, Strategy
from tests import buckets
from tests.faults import children
from tests.faults.children import Count, die
from tests.faults.trainings import HEARTBEAT, Around, Tell, Training, end, in_steps, run_of, said

EPOCH = 7  # steps, in two epochs of batches of 16 pairs in two accumulated parts
TWO_EPOCHS = {
    "--optimizer.total_steps": 2 * EPOCH,
    "--training.grad_accumulation": 2,
    "--training.ema_decay": 0.9,
    "--training.save_every": 5,
    "--training.evaluate_every": 6,
    "--data.batch_size_multiple": 4,
}
BETWEEN_SAVES = {"--training.evaluate_every": 4, "--optimizer.total_steps": 22}
IN_A_BUCKET = {
    "--optimizer.total_steps": 14,
    "--training.save_every": 3,
    "--training.evaluate_every": 5,
}
TWO_PROCESSES = {
    "--optimizer.total_steps": 18,
    "--training.evaluate_every": 0,
    "--strategy": "replicated",
    "--num_processes": 2,
}
KILLED = ((1, 10), (0, 16))  # which process of two, after which step
GRACE = 10.0  # more seconds than the heartbeat, after which the survivor must have ended
REASONS = ("another task died", "another process has died")  # by JAX's runtime, or by ours
PROMISED = 30.0  # seconds from a signal to the end


def at_points(folder: Path) -> Count:
    """Stopped after four chosen steps, and while the parts of a fifth are accumulated.

    Dropout, accumulation, a moving average and two epochs of shuffled pairs are on. The resumed
    training must go on at that step, and leave the bytes of one that was never stopped: of
    parameters, optimizer, average, random state and data position, and the same lines of metrics.
    """
    training = Training(folder, TWO_EPOCHS)
    if f"{EPOCH} batches an epoch" not in said(training.whole):
        raise RuntimeError(said(training.whole))
    points: list[tuple[str, int, Callable[[int, Tell], AbstractContextManager[Any]]]] = [
        ("in the middle of an epoch", 3, _stopped_after),
        ("after a step that is neither logged nor saved", 11, _stopped_after),
        ("at the end of an epoch", EPOCH, _stopped_after),
        ("at the first step of the next epoch", EPOCH + 1, _stopped_after),
        ("while a step is computed", 13, _stopped_during),
    ]
    return children.counted(
        (when, training.resumed(folder / str(step), partial(stopped, step), 143, step=step))
        for when, step, stopped in points
    )


def _stopped_after(last: int, tell: Tell, *, number: int = signal.SIGTERM) -> Any:
    """A signal between the step `last` and the next."""

    def visit(_: int, progress: Progress, step: int, *rest: Any) -> Iterator[None]:
        yield
        if step == last:
            die(number)

    return children.in_calls(Progress, "add", visit)


def _stopped_during(last: int, tell: Tell) -> Any:
    """A signal from another thread while the step `last` is dispatched and computed."""

    def visit(number: int) -> Iterator[None]:
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        if number == last:
            sender.start()
        yield
        if number == last:
            sender.join()

    return in_steps(visit)


def best(folder: Path) -> Count:
    """Evaluated every 4 steps and saved every 7: the best evaluation is that of a kept step.

    Also where it is killed in place of a save, and resumed, which leaves the same bytes.
    """
    training = Training(folder, BETWEEN_SAVES)
    outcomes = [("undisturbed", children.in_child(_kept_best, training.whole))]
    for save in (2, 3, 4):
        place = folder / f"killed-{save}"
        outcome = training.resumed(place, partial(_killed_at, save), -signal.SIGKILL)
        if outcome == "survived":
            outcome = children.in_child(_kept_best, place)
        outcomes.append((f"save {save}", outcome))
    return children.counted(outcomes)


def _killed_at(save: int, tell: Tell) -> Any:
    def visit(number: int, *_: Any) -> Iterator[None]:
        if number == save:
            die()
        yield

    return children.in_calls(Checkpoints, "save", visit)


def _kept_best(place: Path) -> str:
    run = run_of(place)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    scores = [line["validation_bleu"] for line in lines if "validation_bleu" in line]
    checkpoints = Checkpoints(run / "checkpoints")
    kept = checkpoints.metadata(checkpoints.best_step())["early_stopping"]
    if -kept["metric"] != max(scores):
        return f"silent: the best of {scores} is gone, and {kept} took its place"
    return "survived" if len(checkpoints.steps()) <= 5 else f"kept {checkpoints.steps()}"


class Phase(NamedTuple):
    """A call of `owner.name`, within which a signal shall come.

    `calls` are drawn from when there are several; where `programs` is empty nothing is compiled
    before, and the call takes as long as compiling.
    """

    owner: Any
    name: str
    calls: range
    programs: str = "programs"


PHASES = {
    "while the first state is compiled": Phase(Strategy, "init", range(1, 2), ""),
    "while the step is compiled": Phase(CompiledStep, "__call__", range(1, 2), ""),
    "while a step is made": Phase(CompiledStep, "__call__", range(2, 41)),
    "while evaluating": Phase(train, "evaluate", range(1, 3)),
    "while saving": Phase(Checkpoints, "save", range(1, 7)),
}


def at_random(folder: Path, tries: int) -> Count:
    """A training stopped `tries` times, in each phase in turn, at a random moment of it.

    It must end with 143 within 30 seconds and, once resumed, with 0, from the step that was saved,
    with the bytes of a training that was never stopped and its lines of metrics.
    """
    training = Training(folder)
    lengths = {when: _length(training, folder, phase) for when, phase in PHASES.items()}
    random, outcomes = children.drawn(2), []
    for number in range(tries):
        when = list(PHASES)[number % len(PHASES)]
        phase, place = PHASES[when], folder / f"stopped-{number}"
        share, call = random.random(), random.choice(phase.calls)
        [child] = training.begin(place, partial(_told, phase, call), programs=phase.programs)
        for _ in child.told():
            time.sleep(share * lengths[when])
            child.send(signal.SIGTERM)
            sent = time.monotonic()
        code, seconds = child.wait(), time.monotonic() - sent
        if code != 143 or seconds > PROMISED:
            outcome = f"ended with {code} after {seconds:.1f} s: {said(place)}"
        elif phase.owner is not Strategy and not list(run_of(place).glob("checkpoints/*/*.json")):
            outcome = f"nothing was saved: {said(place)}"
        else:
            outcome = training.goes_on(place)
        outcomes.append((f"{when}, {share:.2f}", outcome))
    return children.counted(outcomes)


def _length(training: Training, folder: Path, phase: Phase) -> float:
    """The seconds that the last of the calls of a phase takes."""

    def timed(tell: Tell) -> AbstractContextManager[Any]:
        def visit(number: int, *_: Any) -> Iterator[None]:
            began = time.monotonic()
            yield
            if number == phase.calls[-1]:
                tell(time.monotonic() - began)
                die()

        return children.in_calls(phase.owner, phase.name, visit)

    place = folder / "measured"
    [child] = training.begin(place, timed, programs=phase.programs)
    told = list(child.told())
    if child.wait() != -signal.SIGKILL or len(told) != 1:
        raise RuntimeError(said(place))
    shutil.rmtree(place)
    return told[0]


def _told(phase: Phase, call: int, tell: Tell) -> Any:
    """Tells when the call of that number is entered."""

    def visit(number: int, *_: Any) -> Iterator[None]:
        if number == call:
            tell("entered")
        yield

    return children.in_calls(phase.owner, phase.name, visit)


def in_a_bucket(folder: Path, tries: int) -> Count:
    """A training killed `tries` times in a bucket, each time resumed once.

    The second start must go on from the newest step that was committed, and leave the bytes, the
    scores and the lines of metrics of a local training that was never killed.
    """
    training, random, outcomes = Training(folder, IN_A_BUCKET), children.drawn(7), []
    with buckets.serving():
        began = time.monotonic()
        if training.ended(folder / "measured", runs="gs://bucket/measured") != 0:
            raise RuntimeError(said(folder / "measured"))
        length = time.monotonic() - began
        for number in range(tries):
            place, runs = folder / f"killed-{number}", f"gs://bucket/{number}"
            after = random.random() * length
            [child] = training.begin(place, runs=runs)
            time.sleep(after)
            child.send(signal.SIGKILL)
            child.wait()
            outcomes.append((f"{after:.2f} s", training.goes_on(place, runs=runs)))
    return children.counted(outcomes)


def of_two(folder: Path) -> Count:
    """A training of two processes, of which the second or, as coordinator, the first is killed.

    The other must end within the heartbeat and ten seconds, with a code that is not 0 and a
    sentence; started again, both must go on from a committed step to the bytes of two that nothing
    happened to. They are on this machine and speak over loopback.
    """
    training, outcomes = Training(folder, TWO_PROCESSES), []
    for victim, step in KILLED:
        place = folder / str(victim)
        around: Around = partial(_stopped_after, step, number=signal.SIGKILL)
        processes = training.begin(place, around, process=victim)
        dead = end(processes[victim])
        moment = time.monotonic()
        code = end(processes[1 - victim])
        outcome = judge(code, time.monotonic() - moment, said(place))
        if dead != -signal.SIGKILL:
            outcome = f"the victim ended with {dead}: {said(place)}"
        if outcome == "survived":
            outcome = training.goes_on(place)
        outcomes.append((f"process {victim}, step {step}", outcome))
    return children.counted(outcomes)


def judge(code: int, seconds: float, said: str) -> str:
    """The outcome of the process that survived the other."""
    if code == 0:
        return f"silent: ended with 0 after {seconds:.1f} s: {said}"
    if seconds > HEARTBEAT + GRACE:
        return f"took {seconds:.1f} s to end"
    reason = any(words in said for words in REASONS)
    return "survived" if reason else f"ended with {code} without the reason: {said}"
