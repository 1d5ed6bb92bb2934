"""The steps of a run: which are committed and intact, and which is removed.

Of several processes the first one decides, and the others learn what it has decided.
"""

import itertools
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxformer import storage
from jaxformer.checkpoint import manifest
from jaxformer.distributed.processes import agreed
from jaxformer.errors import CheckpointError

_UNFINISHED = ".orbax-checkpoint-tmp"
_WRITTEN = "commit_success.txt"  # orbax's last file of a step in a bucket
_SET_ASIDE = "corrupt-"

Folders = dict[str, dict[str, int]]
"""The lengths of the files of each folder, by their names."""


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

    def complete(self) -> dict[int, manifest.Manifest]:
        """The manifests of the committed steps whose files have the right lengths, ascending."""
        manifests = {}
        for step, files in _numbered(storage.folders(self.folder)).items():
            with suppress(CheckpointError):
                if manifest.NAME in files:
                    saved = manifest.read(self.path(step))
                    manifest.check_lengths(self.path(step), saved, files)
                    manifests[step] = saved
        return manifests

    def newest(self, *, set_aside: bool) -> int | None:
        """The newest step whose bytes are all intact; None if no step is committed.

        Warns about each damaged step that is newer; with `set_aside` it is renamed. Raises
        `CheckpointError`, with a reason for each, if there are committed steps but none is intact.
        """
        damaged, intact = {}, None
        for step in reversed(_committed(storage.folders(self.folder))):
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

    def best(self, complete: dict[int, manifest.Manifest] | None = None) -> int | None:
        """The committed step with the lowest metric, the newest of equals; None if none has one."""
        manifests = self.complete() if complete is None else complete
        scored = [(m.metric, -step) for step, m in manifests.items() if m.metric is not None]
        return -min(scored)[1] if scored else None

    def is_committed(self, step: int) -> bool:
        """Whether `step` has a manifest, damaged or not."""
        return manifest.NAME in storage.lengths(self.path(step))

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
        folders = storage.folders(self.folder)
        unfinished = self._unfinished(folders)
        uncommitted = (
            _numbered(folders).keys()
            - set(_committed(folders))
            - {int(name) for name in unfinished if name.isdecimal()}
        )
        if newest is not None:
            for step in sorted(step for step in uncommitted if step > newest):
                said = f"{self.path(step)} was never committed, so it does not count"
                warnings.warn(f"{said}, and step {newest} is used", stacklevel=6)
        elif len(uncommitted) > 1 or any(name.startswith(_SET_ASIDE) for name in folders):
            # One interrupted save cannot have left this: to train from zero would be a silent loss.
            raise CheckpointError(
                f"no checkpoint in {self.folder} is committed, though a run has trained there: "
                "restore one from a copy, or use another folder to start anew"
            )
        elif uncommitted or unfinished:
            said = f"the first checkpoint in {self.folder} was never committed"
            warnings.warn(f"{said}: there is nothing to resume, start anew", stacklevel=6)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` regular steps, the newest and the best.

        The manifest goes first. What is left of a step without it does not count, and `clear`
        removes it.
        """
        complete = self.complete()
        regular = [step for step, saved in complete.items() if saved.regular]
        for step in set(list(complete)[:-1]) - {*regular[-keep:], self.best(complete)}:
            self._remove(step)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        folders = storage.folders(self.folder)
        committed = _committed(folders)
        older = {str(step) for step in _numbered(folders) if step < max(committed, default=0)}
        for name in (older - set(map(str, committed))) | set(self._unfinished(folders)):
            storage.remove_tree(self.folder / name)

    def _remove(self, step: int) -> None:
        storage.remove(self.path(step) / manifest.NAME)
        storage.remove_tree(self.path(step))
        self._verified.discard(step)

    def _set_aside(self, step: int) -> str:
        """Renames the folder of `step`, in a bucket by copies that end with the manifest."""
        more = (f"{_SET_ASIDE}{step}-{number}" for number in itertools.count(2))
        folders = storage.folders(self.folder)
        in_bucket = storage.is_in_bucket(self.folder)
        name = next(
            name
            for name in itertools.chain([f"{_SET_ASIDE}{step}"], more)
            if name not in folders or (in_bucket and manifest.NAME not in folders[name])
        )
        if in_bucket:
            for file in sorted(folders[str(step)], key=manifest.NAME.__eq__):
                copy: Any = self.folder / name / file
                copy.replace_by(self.path(step) / file)
            self._remove(step)
        else:
            self.path(step).rename(self.folder / name)
        self._verified.discard(step)
        return name

    def _unfinished(self, folders: Folders) -> list[str]:
        """The folders that orbax has not completed."""
        in_bucket = storage.is_in_bucket(self.folder)
        return [
            name
            for name, files in folders.items()
            if _UNFINISHED in name
            or (in_bucket and name.isdecimal() and not {_WRITTEN, manifest.NAME} & files.keys())
        ]


def _numbered(folders: Folders) -> dict[int, dict[str, int]]:
    return dict(sorted((int(name), files) for name, files in folders.items() if name.isdecimal()))


def _committed(folders: Folders) -> list[int]:
    """The steps with a manifest, damaged or not, ascending."""
    return [step for step, files in _numbered(folders).items() if manifest.NAME in files]


def by_the_first(decide: Callable[[], int]) -> int:
    """The number >= 0 that `decide()` returns on the first process; if it raises, all raise."""
    decision, refused = -1, None
    if jax.process_index() == 0:
        try:
            decision = decide()
        except (ValueError, OSError) as error:
            refused = error
    decision = int(agreed(decision))
    if decision == -1:
        raise refused or CheckpointError("the first process rejected the checkpoint: see its error")
    return decision
