"""One of two processes of a training killed: the other ends in time, and both resume."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments.harness.training.progress import Progress
from jaxformer import distributed
from jaxformer.checkpoint import Checkpoints
from tests.faults import children, trainings
from tests.faults.children import Child, Count
from tests.faults.trainings import Tell

HEARTBEAT = 5  # seconds
GRACE = 10.0  # more seconds, after which the survivor must have ended
KILLS = ((1, 10), (0, 16))  # which process, after which step
CHANGES = {
    "--optimizer.total_steps": 18,
    "--training.evaluate_every": 0,
    "--strategy": "replicated",
    "--num_processes": 2,
}
SAID = ("another task died", "another process has died")  # by JAX's runtime, or by ours


def killed(folder: Path, tries: int) -> Count:
    """A training of two processes, of which the second or, as coordinator, the first is killed.

    The other must end within the heartbeat and ten seconds, with a code that is not 0 and a
    sentence; started again, both must go on from a committed step to the bytes of two that nothing
    happened to. They are on this machine and speak over loopback.
    """
    trainings.load_libraries()
    args = trainings.settings(folder) | CHANGES
    if [trainings.end(child) for child in _two(args, folder / "whole")] != [0, 0]:
        raise RuntimeError(trainings.said(folder / "whole"))
    expected = trainings.left(folder / "whole")
    outcomes = []
    for victim, step in KILLS[:tries]:
        said = _kill(args, folder / "killed", victim, step, expected)
        outcomes.append(said if said == "survived" else f"process {victim}, {step}: {said}")
        shutil.rmtree(folder / "killed")
    return children.counted(outcomes)


def judge(code: int, seconds: float, said: str) -> str:
    """The outcome of the process that survived the other."""
    if code == 0:
        return f"silent: ended with 0 after {seconds:.1f} s: {said}"
    if seconds > HEARTBEAT + GRACE:
        return f"took {seconds:.1f} s to end"
    return (
        "survived"
        if any(words in said for words in SAID)
        else f"ended with {code} without the reason: {said}"
    )


def _kill(args: dict, place: Path, victim: int, step: int, expected: dict) -> str:
    processes = _two(args, place, victim, step)
    dead = trainings.end(processes[victim])
    moment = time.monotonic()
    code = trainings.end(processes[1 - victim])
    if dead != -signal.SIGKILL:
        return f"the victim ended with {dead}: {trainings.said(place)}"
    said = judge(code, time.monotonic() - moment, trainings.said(place))
    if said != "survived":
        return said
    newest = children.in_child(partial(_newest, place))
    return trainings.judge(
        max(trainings.end(child) for child in _two(args, place)), place, expected, newest
    )


def _newest(place: Path) -> int:
    return Checkpoints(trainings.run_of(place) / "checkpoints").newest_step() or 0


def _two(args: dict, place: Path, victim: int = -1, step: int = 0) -> list[Child]:
    """The two processes of a training in `place`; the `victim` dies after `step`."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    args = args | {"--coordinator": address}
    return [
        trainings.begin(
            args | {"--process_id": index}, place, partial(_one, step if index == victim else 0)
        )
        for index in range(2)
    ]


@contextmanager
def _one(last: int, tell: Tell) -> Iterator[None]:
    """One device, a short heartbeat, and, unless `last` is 0, death after that step."""
    jax.config.update("jax_num_cpu_devices", 1)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # each compiles for itself
    add = Progress.add
    distributed.initialize = partial(distributed.initialize, heartbeat=HEARTBEAT)

    def add_and_die(self: Progress, step: int, *rest: Any) -> None:
        add(self, step, *rest)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    Progress.add = add_and_die
    yield
