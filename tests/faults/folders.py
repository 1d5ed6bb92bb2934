"""Folders that cannot be written, that belong to another run or disappear, here and in a bucket."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError
from tests import buckets
from tests.faults import children, states
from tests.faults.children import Child, Count

LIMITS = (0, 40, 250, 1_000, 10_000, 100_000)


def full_disk(folder: Path) -> Count:
    """Saves that run out of room, by a limit on the length of a file, at six places."""
    return children.counted_in_child(
        lambda: [(limit, _fill(folder / str(limit), limit)) for limit in LIMITS]
    )


def misused(folder: Path) -> Count:
    """Three folders that must be refused with a sentence, and nothing lost."""
    return children.counted(
        (case.__name__, case(folder / case.__name__)) for case in (_two_runs, _read_only, _removed)
    )


def in_a_bucket(cases: Callable[..., Count]) -> Callable[..., Count]:
    """`cases` with an empty folder of an emulated bucket in place of a local one."""

    def there(folder: Path, *args: Any) -> Count:
        with buckets.serving():
            # Children are forked from a process that has imported all and sent no request.
            return cases(storage.to_path("gs://bucket/checkpoints"), *args)

    return there


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
            return said
        if checkpoints.steps() != [3] or not states.is_right(checkpoints):
            return f"silent: it left {checkpoints.steps()}"
        states.save(checkpoints, 5)
        checkpoints.wait()
        return "survived" if states.is_right(checkpoints, 5) else "silent: step 5 is wrong"


def _two_runs(folder: Path) -> str:
    """A second run in the folder, while the first holds it."""

    def hold(tell: Callable[[Any], None]) -> None:
        with Checkpoints(folder):
            tell("locked")
            os.read(reading, 1)

    reading, writing = os.pipe()
    first = Child(hold)
    told = first.told()
    next(told)
    said = children.in_child(refused_start, folder)
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
        return refused_start(folder)

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


def refused_start(folder: Path) -> str:
    """Whether a start in the folder is refused."""
    return refusal(lambda: Checkpoints(folder).__enter__(), folder)


def refusal(use: Callable[[], Any], folder: Path) -> str:
    """Whether `use` is refused by an error that brings its own exit code and names the folder."""
    try:
        use()
    except (OSError, ConfigError) as error:
        return "survived" if str(folder) in str(error) else f"the folder is not named: {error}"
    except Exception as error:
        return f"another error: {error!r}"
    return "silent: nothing was refused"
