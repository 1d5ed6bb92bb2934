"""kill -9 while checkpoints are saved, committed and removed; every next start is examined."""

import itertools
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
from tests.faults import children, states
from tests.faults.children import Child, Count

KEEP = 2


def _dying(last: Callable[..., None] = lambda *_: None) -> Callable[..., Iterator[None]]:
    """The process does `last` in place of a call, and dies there."""

    def visit(_: int, *args: Any) -> Iterator[None]:
        last(*args)
        children.die()
        yield

    return visit


def _half(folder: Path) -> None:
    for name in list(storage.lengths(folder))[::2]:
        (folder / name).unlink()


POINTS = {
    "before committing": (manifest, "commit", _dying()),
    "with a manifest not yet in place": (Path, "replace", _dying()),
    "after committing": (manifest, "commit", _dying(manifest.commit)),
    "before a step is removed": (storage, "remove", _dying()),
    "with a step that has lost its manifest": (storage, "remove_tree", _dying()),
    "with half of a step removed": (storage, "remove_tree", _dying(_half)),
}


def at_random(folder: Path, tries: int) -> Count:
    """One run killed `tries` times within its first saves, or (every fifth) while it starts."""
    random = children.drawn(1)
    outcomes, committed, open_tries = [], -1, []
    for number in range(tries + 1):
        child = Child(partial(_train, folder, None))
        told = child.told()
        if number % 5 != 4 or number == tries:  # else killed while it starts
            began = next(told, {"found": -1, "wrong": [], "skipped": ["no start"]})
            outcomes += [(f"try {each}", judge(began, committed)) for each in open_tries]
            open_tries, committed = [], max(committed, began["found"])
        time.sleep(random.uniform(0.0, 0.6))
        child.send(signal.SIGKILL)
        committed = max([committed, *(line["committed"] for line in told if "committed" in line)])
        child.wait()
        open_tries.append(number)
    one = children.in_child(lambda: sum(map(len, states.as_bytes(states.make_state(0)))))
    used = children.in_child(lambda: sum(storage.lengths(folder).values()))
    if used > (KEEP + 3) * 1.2 * one:
        outcomes.append(("in the end", f"{used:,} bytes are {used / one:.1f} times a checkpoint"))
    return children.counted(outcomes)


def at_a_point(folder: Path, tries: int) -> Count:
    """`tries` runs for each of `POINTS`, killed there, and the next start of each."""
    outcomes, reached = [], {}
    for point, number in itertools.product(POINTS, range(tries)):
        place = folder / f"{point}-{number}"
        child = Child(partial(_train, place, POINTS[point]))
        committed = max([-1, *(line["committed"] for line in child.told() if "committed" in line)])
        if child.wait() == -signal.SIGKILL:
            reached[place] = committed
        else:
            outcomes.append((point, "was never reached"))
    starts = children.in_child(lambda: [_start(place) for place in reached])
    for (place, committed), start in zip(reached.items(), starts, strict=True):
        outcomes.append((place.name, judge(start, committed)))
    return children.counted(outcomes)


def _train(folder: Path, point: tuple | None, tell: Callable[[Any], None]) -> None:
    """Starts as a training does and saves without end; from its third step on, death waits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints = Checkpoints(folder, keep=KEEP).__enter__()
    began = _examine(checkpoints)
    tell(began)
    for step in itertools.count(began["found"] + 1):
        if point is not None and step == began["found"] + KEEP + 1:
            checkpoints.wait()
            tell({"committed": step - 1})
            with children.in_calls(*point):
                states.save(checkpoints, step)
                checkpoints.wait()
            return
        states.save(checkpoints, step)  # the one before is committed when this returns
        tell({"committed": step - 1})


def _start(folder: Path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpoints(folder, keep=KEEP) as checkpoints:
            return _examine(checkpoints)


def _examine(checkpoints: Checkpoints) -> dict:
    """The step a start goes on from, -1 for zero, and which of the steps there are wrong."""
    newest = checkpoints.newest_step()
    wrong = [step for step in checkpoints.steps() if not states.is_right(checkpoints, step)]
    if newest is not None and not states.is_right(checkpoints):
        wrong.append(newest)
    folders = storage.folders(checkpoints.folder)
    committed = [name for name, files in folders.items() if manifest.NAME in files]
    skipped = [name for name in committed if int(name) > (newest or 0)]
    return {"found": -1 if newest is None else newest, "wrong": wrong, "skipped": skipped}


def judge(began: dict, committed: int) -> str:
    """The outcome of a kill, by what the next start found and what was committed before."""
    if began["wrong"]:
        return f"silent: steps {began['wrong']} are not what was saved"
    if began["found"] < committed:
        return f"step {began['found']} was found, but {committed} was committed"
    if began["skipped"]:
        return f"a whole step was skipped: {began['skipped']}"
    return "survived"
