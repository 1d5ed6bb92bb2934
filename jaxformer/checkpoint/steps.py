"""The steps of a run on disk: which are committed and intact, which is removed, who may write.

Of several processes the first one decides, and the others learn what it has decided.
"""

import importlib.util
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.checkpoint import manifest
from jaxformer.errors import CheckpointError, ConfigError

_UNFINISHED = "*.orbax-checkpoint-tmp*"
_SET_ASIDE = "corrupt-"
_LOCK = ".lock"


class StepFolders:
    """The folders `folder/STEP/`; a step counts when its manifest commits it.

    The bytes of a step are read and compared with its manifest once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self._verified: set[int] = set()

    def path(self, step: int) -> Path:
        """The folder of `step`."""
        return self.folder / str(step)

    def complete(self) -> list[int]:
        """The committed steps whose files have the right lengths, ascending."""
        return [step for step in self._numbered() if self._manifest(step) is not None]

    def newest(self, *, set_aside: bool) -> int | None:
        """The newest step whose bytes are all intact; None if no step is committed.

        Warns about each damaged step that is newer; with `set_aside` it is renamed. Raises
        `CheckpointError`, with a reason for each, if there are committed steps but none is intact.
        """
        damaged, intact = {}, None
        for step in reversed(self._committed()):
            try:
                self.verify(step)
                intact = step
                break
            except CheckpointError as error:
                damaged[step] = str(error)
        if damaged and intact is None:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(damaged.values())}. Nothing "
                "was deleted: restore one from a copy, or use another folder to start anew"
            )
        for step, reason in damaged.items():
            done = f"it was renamed {self._set_aside(step)}" if set_aside else "it is ignored"
            warnings.warn(f"{reason}; {done}, and step {intact} is used", stacklevel=3)
        return intact

    def best(self) -> int | None:
        """The committed step with the lowest metric, the newest of equals; None if none has one."""
        manifests = {step: self._manifest(step) for step in self._numbered()}
        scored = [
            (saved.metric, -step)
            for step, saved in manifests.items()
            if saved is not None and saved.metric is not None
        ]
        return -min(scored)[1] if scored else None

    def verify(self, step: int) -> None:
        """Raises `CheckpointError` unless every byte of `step` is what was committed."""
        if step not in self._verified:
            folder = self.path(step)
            manifest.check(folder, manifest.read(folder))
            self._verified.add(step)

    def check_uncommitted(self, newest: int | None) -> None:
        """Warns about steps after `newest` that were never committed, and are not used.

        Raises `CheckpointError` if no step is intact, but more was saved here than one
        interrupted save leaves.
        """
        uncommitted = set(self._numbered()) - set(self._committed())
        if newest is not None:
            for step in sorted(step for step in uncommitted if step > newest):
                said = f"{self.path(step)} was never committed, so it does not count"
                warnings.warn(f"{said}, and step {newest} is used", stacklevel=6)
        elif len(uncommitted) > 1 or any(self.folder.glob(f"{_SET_ASIDE}*")):
            # One interrupted save cannot have left this: to train from zero would be a silent loss.
            raise CheckpointError(
                f"no checkpoint in {self.folder} is committed, though a run has trained there: "
                "restore one from a copy, or use another folder to start anew"
            )
        elif uncommitted or any(self.folder.glob(_UNFINISHED)):
            said = f"the first checkpoint in {self.folder} was never committed"
            warnings.warn(f"{said}: there is nothing to resume, start anew", stacklevel=6)

    def prune(self, keep: int) -> None:
        """Removes, each by one rename, all steps but the newest `keep` and the best."""
        trash = self.folder / "trash"
        steps = self.complete()
        for step in set(steps[:-keep]) - {self.best()}:
            trash.mkdir(exist_ok=True)
            self.path(step).rename(trash / str(step))
            self._verified.discard(step)
        shutil.rmtree(trash, ignore_errors=True)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        shutil.rmtree(self.folder / "trash", ignore_errors=True)
        for path in self.folder.glob(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, step: int) -> str:
        more = (f"{_SET_ASIDE}{step}-{number}" for number in itertools.count(2))
        names = itertools.chain([f"{_SET_ASIDE}{step}"], more)
        name = next(name for name in names if not (self.folder / name).exists())
        self.path(step).rename(self.folder / name)
        self._verified.discard(step)
        return name

    def _numbered(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (entry.name for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _committed(self) -> list[int]:
        """The steps with a manifest, damaged or not, ascending."""
        return [step for step in self._numbered() if manifest.is_committed(self.path(step))]

    def _manifest(self, step: int) -> manifest.Manifest | None:
        """The manifest of a committed step whose files have the right lengths."""
        folder = self.path(step)
        try:
            saved = manifest.read(folder)
            manifest.check_lengths(folder, saved)
        except CheckpointError:
            return None
        return saved


def lock(folder: Path) -> TextIO:
    """Locks `folder` and returns the lock file; closing it, or the end of the process, unlocks.

    Creates the folder if it is missing. Raises `ConfigError` while another process, or another
    lock of this process, holds it. Where the system or the file system has no locks, nothing is
    locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    file = path.open("a+", encoding="ascii", errors="replace")
    try:
        if importlib.util.find_spec("fcntl") is not None:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read(20).strip() or "unknown"
        file.close()
        raise ConfigError(
            f"{folder} is being written by another run (process {owner}): wait until it ends, or "
            "use another folder"
        ) from error
    except OSError:
        pass  # the file system has no locks: train without one
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def agreed(value: int) -> int:
    """The first process's `value`, in every process."""
    if jax.process_count() == 1:
        return value
    try:
        return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
    except ValueError as error:  # `jax.jit` raises it when another process is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error


def by_the_first(decide: Callable[[], int]) -> int:
    """The number >= 0 that `decide()` returns on the first process; if it raises, all raise."""
    decision, refused = -1, None
    if jax.process_index() == 0:
        try:
            decision = decide()
        except (ValueError, OSError) as error:
            refused = error
    decision = agreed(decision)
    if decision == -1:
        raise refused or CheckpointError("the first process rejected the checkpoint: see its error")
    return decision
