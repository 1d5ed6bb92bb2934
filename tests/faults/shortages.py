"""Trainings that run out of memory or of disk, meet a damaged cache or a clock that goes back."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import CompiledStep
from tests.faults import children, trainings
from tests.faults.children import Count
from tests.faults.trainings import Tell

FOR_GOOD = 3  # saves in a row
AT = 17  # the step at which it happens: 14 was saved, and 15 as the best
ASKED = 123_456_789_012
ERRORS = (
    f"RESOURCE_EXHAUSTED: Out of memory allocating {ASKED} bytes.",
    f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {ASKED} bytes.",
    "INTERNAL: YNNPACK operation failed",
)
REMEDIES = ("--data.batch_tokens", "--training.grad_accumulation", "--training.remat blocks")


def memory(folder: Path) -> Count:
    """A step that finds no memory, as XLA says it in three ways.

    The training must end with 1 and say what was asked for and three settings to change; started
    again, it must go on from its last checkpoint to the bytes of one that had enough.
    """
    trainings.load_libraries()
    args = trainings.settings(folder)
    expected = trainings.completed_once(args, folder)
    outcomes = []
    for number, error in enumerate(ERRORS):
        place = folder / f"short-{number}"
        code = trainings.ended(args, place, partial(_short_of_memory, error))
        said = trainings.said(place)
        wanted = "error: out of memory", *REMEDIES
        wanted += ("115.0 GiB were asked for",) if str(ASKED) in error else ()
        missing = [word for word in wanted if word not in said.splitlines()[-1]]
        if code != 1 or missing:
            outcomes.append(f"{error}: ended with {code}, without {missing}: {said}")
        else:
            outcomes.append(trainings.goes_on(args, place, expected, 15))
    return children.counted(outcomes)


def disk(folder: Path) -> Count:
    """A disk with no room left for checkpoints, logs and metrics, for a while and for good.

    After one or two saves that failed the training must end with the same bytes, and at most lack
    metrics; after three it must end with 74, and, with room again, go on from its last checkpoint
    to the same bytes. The disk is a file system of its own.
    """
    trainings.load_libraries()
    args = trainings.settings(folder)
    place = folder / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        raise RuntimeError("a file system cannot be mounted here: run this as root")
    try:
        expected = trainings.completed_once(args, folder)
        outcomes = [_fill(args, place / str(n), expected, n) for n in (1, 2, FOR_GOOD)]
    finally:
        subprocess.run(["umount", str(place)], check=True)
    return children.counted(outcomes)


def cache(folder: Path, tries: int) -> Count:
    """Compiled programs in the cache cut short, emptied or overwritten: the same bytes learned."""
    trainings.load_libraries()
    args = trainings.settings(folder)
    expected = trainings.completed_once(args, folder)
    programs, outcomes = folder / "programs", []
    for number in range(tries):
        shutil.copytree(folder.parent / "programs", programs)
        random = children.drawn(number)
        for path in programs.iterdir():
            content = path.read_bytes()
            kept = content[: random.randrange(len(content))] if number else b""
            path.write_bytes(kept + random.randbytes(len(content) - len(kept)) * (number % 2))
        place = folder / "damaged"
        code = trainings.ended(args, place, programs=str(programs))
        same = code == 0 and trainings.left(place) == expected
        outcomes.append("survived" if same else f"cut {number}: {code} {trainings.said(place)}")
        shutil.rmtree(place)
        shutil.rmtree(programs)
    return children.counted(outcomes)


def clock(folder: Path) -> Count:
    """The clock goes back by an hour, or by ten years, while a training runs: the same bytes."""
    trainings.load_libraries()
    args = trainings.settings(folder)
    expected = trainings.completed_once(args, folder)
    outcomes = []
    for seconds in (3_600, 10 * 365 * 86_400):
        place = folder / f"back-{seconds}"
        code = trainings.ended(args, place, partial(_back, seconds))
        same = code == 0 and trainings.left(place) == expected
        outcomes.append("survived" if same else f"{seconds} s: {code} {trainings.said(place)}")
    return children.counted(outcomes)


@contextmanager
def _short_of_memory(text: str, tell: Tell) -> Iterator[None]:
    """The compiled step number `AT` fails as XLA's would."""
    begin = CompiledStep.__init__

    def begun(self: CompiledStep, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._compiled = _Failing(self._compiled, text)

    CompiledStep.__init__ = begun
    yield


class _Failing:
    """A compiled function whose call number `AT` finds no memory."""

    def __init__(self, compiled: Any, text: str):
        self._compiled, self._text, self._calls = compiled, text, 0
        self.lower = compiled.lower

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls == AT:
            raise jax.errors.JaxRuntimeError(self._text)
        return self._compiled(*args)


def _fill(args: dict, place: Path, expected: dict, saves: int) -> str:
    """The outcome of a training whose disk is full for so many saves."""
    programs = str(place.parent.parent.parent / "programs")
    code = trainings.ended(args, place, partial(_full, place.parent, saves), programs=programs)
    said = trainings.said(place)
    shutil.copytree(place, copy := place.parent.parent / f"copy-{saves}")
    shutil.rmtree(place)
    if saves == FOR_GOOD:
        if code != 74 or "could not be written" not in said:
            return f"full for good: ended with {code}: {said}"
        newest = children.in_child(
            lambda: Checkpoints(trainings.run_of(copy) / "checkpoints").newest_step()
        )
        return trainings.goes_on(args, copy, expected, newest)
    if code != 0:
        return f"full for {saves} saves: ended with {code}: {said}"
    found = trainings.left(copy)
    if "the next save tries again" not in said:
        return f"full for {saves} saves: none of them failed: {said}"
    wrong = [n for n in expected if n not in ("metrics", "weights", "scores")]
    wrong = [name for name in wrong if found[name] != expected[name]]
    more = [line for line in found["metrics"] if line not in expected["metrics"]]
    return f"silent: other {wrong}, {more}" if wrong or more else "survived"


@contextmanager
def _full(disk: Path, saves: int, tell: Tell) -> Iterator[None]:
    """Another file takes all room of `disk` from the second save on, until `saves` have failed."""
    save, calls = Checkpoints.save, iter(range(1, 100))
    other = disk / "other"

    def save_without_room(self: Checkpoints, *args: Any, **named: Any) -> None:
        call = next(calls)
        if call == 2:
            self.wait()
            _take_all(other)
        if call == 2 + saves and saves != FOR_GOOD:
            futures.wait(filter(None, [self._committing]))
            other.unlink()
        save(self, *args, **named)

    Checkpoints.save = save_without_room
    try:
        yield
    finally:
        other.unlink(missing_ok=True)


def _take_all(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@contextmanager
def _back(seconds: float, tell: Tell) -> Iterator[None]:
    """From the step `AT` on the clock shows `seconds` less."""
    call, calls, now = CompiledStep.__call__, iter(range(1, 1_000)), time.time

    def call_and_turn(self: CompiledStep, *args: Any) -> Any:
        if next(calls) == AT:
            time.time = lambda: now() - seconds
        return call(self, *args)

    CompiledStep.__call__ = call_and_turn
    yield
