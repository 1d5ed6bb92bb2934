"""The steps of a run: which are committed and intact, and which is removed.

Process 0 decides; the others receive the decision.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxformer import storage
from jaxformer.checkpoint import manifest
from jaxformer.distributed.processes import agreed
from jaxformer.errors import CheckpointError

D = TypeVar("D", bound=int | None)

_UNFINISHED = ".orbax-checkpoint-tmp"
_WRITTEN = "commit_success.txt"  # orbax's last file of a step in a bucket

Folders = dict[str, dict[str, int]]
"""The lengths of the files of each folder, by their names."""


class StepFolders:
    """The folders `folder/STEP/`; a step counts when its manifest commits it.

    The bytes of a step are read and compared with its manifest once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self._verified: set[int] = set()
        self._damaged: dict[int, str] = {}  # the reason of each

    def path(self, step: int) -> Path:
        """The folder of `step`."""
        return self.folder / str(step)

    def complete(self) -> dict[int, manifest.Manifest]:
        """The manifests of the committed steps whose files have the right lengths, ascending.

        Warns once about each that is damaged, and leaves it out.
        """
        manifests = {}
        for step, files in _numbered(storage.folders(self.folder)).items():
            if manifest.NAME not in files or step in self._damaged:
                continue
            try:
                saved = manifest.read(self.path(step))
                manifest.check_lengths(self.path(step), saved, files)
                manifests[step] = saved
            except CheckpointError as error:
                if self.is_committed(step):  # otherwise it has been removed since it was listed
                    self._damaged[step] = str(error)
                    warnings.warn(f"{error}; step {step} is skipped", stacklevel=4)
        return manifests

    def newest(self) -> int | None:
        """The newest step whose bytes are all intact; None if no step is committed.

        Warns once about each damaged step that is newer and skips it. Raises `CheckpointError`,
        with a reason for each, if there are committed steps but none is intact.
        """
        committed = _committed(storage.folders(self.folder))
        found = []
        for step in reversed(committed):
            if step in self._damaged:
                continue
            try:
                self.verify(step)
            except CheckpointError as error:
                self._damaged[step] = str(error)
                found.append(f"{error}; it is skipped")
                continue
            for problem in found:
                warnings.warn(f"{problem}, and step {step} is used", stacklevel=3)
            return step
        if committed:
            reasons = "; ".join(self._damaged[step] for step in committed)
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact: {reasons}. Nothing was deleted: "
                "restore one from a copy, or use another folder to start anew"
            )
        return None

    def skip_newer(self, step: int) -> None:
        """Leaves the committed steps after `step` out: the first process has found them damaged."""
        for other in _committed(storage.folders(self.folder)):
            if other > step:
                self._damaged.setdefault(other, "")

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
                problem = f"{self.path(step)} was never committed, so it does not count"
                warnings.warn(f"{problem}, and step {newest} is used", stacklevel=6)
        elif len(uncommitted) > 1:
            # One interrupted save cannot have left this: to train from zero would be a silent loss.
            raise CheckpointError(
                f"no checkpoint in {self.folder} is committed, though a run has trained there: "
                "restore one from a copy, or use another folder to start anew"
            )
        elif uncommitted or unfinished:
            problem = f"the first checkpoint in {self.folder} was never committed"
            warnings.warn(f"{problem}: there is nothing to resume, start anew", stacklevel=6)

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` regular steps, the newest and the best.

        A damaged step goes when there is a newer one. The manifest goes first: what is left of a
        step without it does not count, and `clear` removes it.
        """
        complete = self.complete()
        regular = [step for step, saved in complete.items() if saved.regular]
        newest = max(complete)
        kept = {*regular[-keep:], self.best(complete)}
        for step in {*complete, *self._damaged} - kept:
            if step < newest:
                self.remove(step)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        folders = storage.folders(self.folder)
        committed = _committed(folders)
        older = {str(step) for step in _numbered(folders) if step < max(committed, default=0)}
        for name in (older - set(map(str, committed))) | set(self._unfinished(folders)):
            storage.remove_tree(self.folder / name)

    def remove(self, step: int) -> None:
        """Removes `step`, its manifest first."""
        storage.remove(self.path(step) / manifest.NAME)
        storage.remove_tree(self.path(step))
        self.forget(step)

    def forget(self, step: int) -> None:
        """Forgets whether `step` was intact, for it is removed or written again."""
        self._verified.discard(step)
        self._damaged.pop(step, None)

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


def on_process_zero(decide: Callable[[], D]) -> D:
    """The result of `decide()` on process 0: a number >= 0 or None. If it raises, all raise."""
    sent = _RAISED
    refused = None
    if jax.process_index() == 0:
        try:
            decision = decide()
            sent = _NONE if decision is None else decision
        except (ValueError, OSError) as error:
            refused = error
    received: Any = int(agreed(sent))
    if received == _RAISED:
        raise refused or CheckpointError("the first process rejected the checkpoint: see its error")
    if received == _NONE:
        received = None
    return received


_RAISED = -1
_NONE = -2
"""Numbers that stand for an error and for None on the way to all processes."""
