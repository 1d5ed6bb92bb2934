"""Folders that cannot be written, that belong to another run, or that disappear."""

import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError
from tests.faults import children, states
from tests.faults.children import Child, Count

LIMITS = (0, 40, 250, 1_000, 10_000, 100_000)


def full_disk(folder: Path) -> Count:
    """Saves that run out of room, by a limit on the length of a file, at six places."""
    outcomes = children.in_child(lambda: [_fill(folder / str(n), n) for n in LIMITS])
    return children.counted(outcomes)


def misused(folder: Path) -> Count:
    """Three folders that must be refused with a sentence, and nothing lost."""
    cases = (two_runs, _read_only, _removed)
    outcomes = [case(folder / case.__name__.strip("_")) for case in cases]
    return children.counted(outcomes)


def _fill(folder: Path, limit: int) -> str:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # orbax logs each error with its stack
    with Checkpoints(folder) as checkpoints:
        states.save(checkpoints, 3)
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        said = refusal(lambda: (states.save(checkpoints, 5), checkpoints.wait()), folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if said != "survived":
            return f"limit {limit}: {said}"
        if checkpoints.steps() != [3] or not states.is_right(checkpoints):
            return f"silent: limit {limit} left {checkpoints.steps()}"
        states.save(checkpoints, 5)
        checkpoints.wait()
        return "survived" if states.is_right(checkpoints, 5) else "silent: step 5 is wrong"


def two_runs(folder: Path) -> str:
    """A second run in the folder, while the first holds it."""

    def hold(tell: Callable[[Any], None]) -> None:
        with Checkpoints(folder):
            tell("locked")
            os.read(reading, 1)

    reading, writing = os.pipe()
    first = Child(hold)
    told = first.told()
    next(told)
    said = children.in_child(partial(refusal, lambda: Checkpoints(folder).__enter__(), folder))
    os.write(writing, b".")
    first.wait()
    os.close(reading), os.close(writing)
    return said


def _read_only(folder: Path) -> str:
    def refused() -> str:
        states.make_folder(folder, (3,))
        (folder / ".lock").unlink()
        folder.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # nothing is read-only for root
        return refusal(lambda: Checkpoints(folder).__enter__(), folder)

    said = children.in_child(refused)
    folder.chmod(0o755)
    return said


def _removed(folder: Path) -> str:
    def removed() -> str:
        with Checkpoints(folder) as checkpoints:
            states.save(checkpoints, 3)
            checkpoints.wait()
            shutil.rmtree(folder)
            states.save(checkpoints, 5)
            checkpoints.wait()
            right = checkpoints.steps() == [5] and states.is_right(checkpoints)
        return "survived" if right else "silent: the step saved after the removal is not there"

    return children.in_child(removed)


def refusal(use: Callable[[], Any], folder: Path) -> str:
    """Whether `use` is refused by an error that brings its own exit code and names the folder."""
    try:
        use()
    except (OSError, ConfigError) as error:
        return "survived" if str(folder) in str(error) else f"the folder is not named: {error}"
    except Exception as error:
        return f"another error: {error!r}"
    return "silent: nothing was refused"
