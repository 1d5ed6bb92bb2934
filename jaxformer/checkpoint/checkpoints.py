"""The checkpoints of a run: saved in the background, committed, verified, pruned."""

import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxformer.checkpoint import manifest, serialization
from jaxformer.checkpoint.lock import lock
from jaxformer.errors import CheckpointError

_UNFINISHED = "*.orbax-checkpoint-tmp*"
_SET_ASIDE = "corrupt-"


class Checkpoints:
    """The checkpoints of one run: `folder/STEP/` holds a state and a manifest that commits it.

    Only a committed step counts, and it is read only if every file has the length and the CRC-32
    of its manifest. The newest `keep` steps are kept, and the step with the lowest metric. Nothing
    is unpickled: arrays are stored by tensorstore, metadata as JSON.

    Reading never changes the folder, so a run that is still training can be read. Only one run at a
    time can write: entering a `with` block, or the first `save`, locks the folder until the end of
    the block, `close`, or the end of the process. Locking renames a damaged step to `corrupt-STEP`,
    with a warning. A process that ends without `close` may lose its last save.

    A save that fails is only a warning until `patience` saves in a row have failed, for a disk that
    is full for a while.
    """

    def __init__(self, folder: str | Path, *, keep: int = 5, patience: int = 1):
        for name, number in (("keep", keep), ("patience", patience)):
            if number < 1:
                raise CheckpointError(f"{name}={number}, but it must be at least 1")
        self.folder: Path = Path(folder).absolute()
        self._keep, self._patience, self._failed = keep, patience, 0
        self._lock: TextIO | None = None
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._committing: Future | None = None
        self._verified: set[int] = set()

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> None:
        """Starts to write `state` as `step`; returns before everything is on disk.

        `state` is any pytree of arrays, numbers, typed PRNG keys and None. `metadata` is any dict
        that JSON can hold. The lowest `metric` is the best (a loss; negate a score); NaN is never
        the best. A step that is already committed is not changed.

        Raises `OSError` if this write or the previous one failed and `patience` is used up,
        `ConfigError` while another run writes to the folder, and `CheckpointError` if there are
        steps and none of them is intact.
        """
        try:
            plain = json.loads(json.dumps(metadata or {}))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata must be JSON, use plain values: {error}") from error
        self._open()
        with self._with_patience():
            self.wait()
        if _agreed(step in self.steps()):
            return
        leaves = serialization.shapes(jax.tree.map(serialization.stored_as, state))
        stored = ocp.args.PyTreeSave(jax.tree.map(serialization.storable, state))
        metric = None if metric is None or metric != metric else float(metric)
        with self._with_patience(), self._writing():
            assert self._writer is not None and self._thread is not None
            items = ocp.args.Composite(state=stored)
            self._writer.save(self.folder / str(step), args=items, force=True)
            self._committing = self._thread.submit(self._finish, step, leaves, plain, metric)

    def wait(self) -> None:
        """Returns when every save is committed and old steps are removed.

        Raises `OSError` if the last save failed.
        """
        if self._committing is None:
            return
        committing, self._committing = self._committing, None
        with self._writing():
            error = committing.exception()
            committed = _agreed(
                error is None
            )  # only the first process commits; this tells the others
            if error is not None:
                raise error
            if not committed:
                raise OSError("the first process has failed: see its error")
        self._failed = 0

    def close(self) -> None:
        """Waits for the saves like `wait`, ends the writing threads and unlocks the folder."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> "Checkpoints":
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The error that ends the block is raised; a failure to close may be its consequence.
        with suppress(Exception) if kind is not None else nullcontext():
            self.close()

    def steps(self) -> list[int]:
        """The committed steps whose files have the right lengths, ascending."""
        return [step for step in self._numbered() if self._manifest(step) is not None]

    def newest_step(self) -> int | None:
        """The newest step whose bytes are all intact; None if no step is committed.

        Warns about each damaged step that is newer. Raises `CheckpointError`, with a reason for
        each, if there are committed steps but none is intact.
        """
        damaged, found = {}, None
        for step in reversed(self._numbered()):
            if not manifest.is_committed(self.folder / str(step)):
                continue
            try:
                self._verify(step)
                found = step
                break
            except CheckpointError as error:
                damaged[step] = str(error)
        if damaged and found is None:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(damaged.values())}. Nothing "
                "was deleted: restore one from a copy, or use another folder to start anew"
            )
        for step, reason in damaged.items():
            done = f"it was renamed {self._set_aside(step)}" if self._lock else "it is ignored"
            warnings.warn(f"{reason}; {done}, and step {found} is used", stacklevel=2)
        return found

    def best_step(self) -> int | None:
        """The committed step with the lowest metric, the newest of equals; None if none has one."""
        manifests = {step: self._manifest(step) for step in self._numbered()}
        scored = [
            (found.metric, -step)
            for step, found in manifests.items()
            if found is not None and found.metric is not None
        ]
        return -min(scored)[1] if scored else None

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with `step`; None means the newest intact step."""
        return manifest.read(self.folder / str(self._verified_step(step))).metadata

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The state and the metadata of `step`; None means the newest intact step.

        A leaf of `abstract_state` is an array or a `jax.ShapeDtypeStruct`. If its sharding spans
        several devices, the restored leaf has the same sharding, whatever it was saved with.
        Raises `CheckpointError` before anything is loaded, with the names of the leaves, if one is
        missing, is not expected, or has another shape or dtype.
        """
        step = _by_the_first(lambda: self._verified_step(step))
        target = jax.tree.map(serialization.stored_as, abstract_state)
        saved = manifest.read(self.folder / str(step))
        wrong = serialization.differences(saved.leaves, serialization.shapes(target))
        if wrong:
            raise CheckpointError(
                f"{self.folder / str(step)} does not fit this model and optimizer: {wrong}. Use "
                "the settings that it was trained with"
            )
        state = self._read(
            step, target, jax.tree.map(serialization.restore_args, target), partial=False
        )
        return jax.tree.map(serialization.as_given, abstract_state, state), saved.metadata

    def restore_params(self, step: int | None = None, *, tree: str = "params") -> dict[str, Any]:
        """The field `tree` of the state of `step`, as nested dicts of numpy arrays."""
        step = self._verified_step(step)
        stored = self._stored(step)
        if not isinstance(stored, dict) or not stored.get(tree):
            raise CheckpointError(f"{self.folder / str(step)} holds no {tree!r}")
        target = {tree: stored[tree]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
        return self._read(step, target, as_numpy, partial=True)[tree]

    def average_params(self, steps: Iterable[int], *, tree: str = "params") -> dict[str, Any]:
        """The mean of the field `tree` over `steps`, summed in float64, in the stored dtype.

        Vaswani et al. 2017, section 6.1, average the last 5 (base) or 20 (big) checkpoints.
        """
        steps = list(steps)
        if not steps:
            raise CheckpointError("steps is empty, but an average needs at least one step")
        first = self.restore_params(steps[0], tree=tree)
        total = jax.tree.map(lambda leaf: leaf.astype(np.float64), first)
        for step in steps[1:]:
            total = jax.tree.map(np.add, total, self.restore_params(step, tree=tree))
        return jax.tree.map(lambda s, leaf: (s / len(steps)).astype(leaf.dtype), total, first)

    def _open(self) -> None:
        """Locks the folder, removes what a killed process left and sets damaged steps aside."""
        if self._writer is not None:
            return
        try:
            _by_the_first(self._begin)
        except (ValueError, OSError):
            self._release()
            raise
        self._writer = _make_writer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def _begin(self) -> int:
        self._lock = lock(self.folder)
        newest = self.newest_step()
        folders = {step: self.folder / str(step) for step in self._numbered()}
        uncommitted = [step for step in folders if not manifest.is_committed(folders[step])]
        if newest is not None:
            for step in [step for step in uncommitted if step > newest]:
                said = f"{folders[step]} was never committed, so it does not count"
                warnings.warn(f"{said}, and step {newest} is used", stacklevel=4)
        elif len(uncommitted) > 1 or any(self.folder.glob(f"{_SET_ASIDE}*")):
            # One interrupted save cannot have left this: to train from zero would be a silent loss.
            raise CheckpointError(
                f"no checkpoint in {self.folder} is committed, though a run has trained there: "
                "restore one from a copy, or use another folder to start anew"
            )
        elif uncommitted or any(self.folder.glob(_UNFINISHED)):
            said = f"the first checkpoint in {self.folder} was never committed"
            warnings.warn(f"{said}: there is nothing to resume, start anew", stacklevel=4)
        self._clear()
        return 0

    def _recover(self) -> None:
        """After a failed write: makes a new writer and removes the unfinished files."""
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()  # otherwise the next save would raise this failure again
        self._writer = _make_writer()
        if jax.process_index() == 0:
            self._clear()

    def _release(self) -> None:
        with ExitStack() as ending:  # last in, first out; each runs even if another fails
            for resource in (self._lock, self._writer):
                if resource is not None:
                    ending.callback(resource.close)
            if self._thread is not None:
                ending.callback(self._thread.shutdown)
        self._writer = self._lock = self._thread = None

    def _finish(
        self, step: int, leaves: dict[str, str], metadata: dict[str, Any], metric: float | None
    ) -> None:
        """In the background: commits what orbax has written, then removes old steps."""
        assert self._writer is not None
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            manifest.commit(self.folder / str(step), leaves, metadata, metric)
            self._prune()

    def _prune(self) -> None:
        """Removes the steps that are neither among the newest nor the best, each by one rename."""
        trash = self.folder / "trash"
        steps = self.steps()
        for step in set(steps[: -self._keep]) - {self.best_step()}:
            trash.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(trash / str(step))
            self._verified.discard(step)
        shutil.rmtree(trash, ignore_errors=True)

    def _clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        shutil.rmtree(self.folder / "trash", ignore_errors=True)
        for path in self.folder.glob(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, step: int) -> str:
        endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        names = (f"{_SET_ASIDE}{step}{ending}" for ending in endings)
        name = next(name for name in names if not (self.folder / name).exists())
        (self.folder / str(step)).rename(self.folder / name)
        self._verified.discard(step)
        return name

    def _numbered(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (entry.name for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _manifest(self, step: int) -> manifest.Manifest | None:
        """The manifest of a committed step whose files have the right lengths."""
        folder = self.folder / str(step)
        try:
            found = manifest.read(folder)
            manifest.check_lengths(folder, found)
        except CheckpointError:
            return None
        return found

    def _verify(self, step: int) -> None:
        """Raises `CheckpointError` unless every byte of `step` is what was committed."""
        if step not in self._verified:
            folder = self.folder / str(step)
            manifest.check(folder, manifest.read(folder))
            self._verified.add(step)

    def _verified_step(self, step: int | None) -> int:
        """`step` if it is intact; the newest intact step if it is None."""
        self.wait()
        if step is None:
            step = self.newest_step()
            if step is None:
                raise CheckpointError(
                    f"there is no committed checkpoint in {self.folder}: train first"
                )
        elif not manifest.is_committed(self.folder / str(step)):
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"there is no committed checkpoint of step {step} in {self.folder}: it has {there}"
            )
        self._verify(step)
        return step

    def _stored(self, step: int) -> Any:
        """The stored state as dicts and lists; a leaf has a shape and a dtype."""
        path: Any = self.folder / str(step) / "state"  # orbax declares a path type of its own
        with _reading(path):
            return ocp.PyTreeCheckpointHandler().metadata(path).tree

    def _read(self, step: int, target: Any, restore_args: Any, *, partial: bool) -> Any:
        path = self.folder / str(step) / "state"
        request = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=partial)
        with _reading(path):
            return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path, args=request)

    @contextmanager
    def _with_patience(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed += 1
            if self._failed >= self._patience:
                raise
            left = self._patience - self._failed
            said = f"{error}; the next save tries again, and {left} more failures end the run"
            warnings.warn(said, stacklevel=4)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self._recover()
            raise  # the step that computed the state has failed, not the disk
        except Exception as error:  # orbax raises many kinds of errors
            self._recover()
            said = f"a checkpoint could not be written to {self.folder}: {error}"
            raise OSError(said) from error


def _make_writer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error


def _agreed(value: int) -> int:
    """The first process's `value`, in every process."""
    if jax.process_count() == 1:
        return value
    try:
        return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
    except ValueError as error:  # `jax.jit` raises it when another process is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error


def _by_the_first(decide: Callable[[], int]) -> int:
    """The number >= 0 that `decide()` returns on the first process; if it raises, all raise."""
    found, refused = -1, None
    if jax.process_index() == 0:
        try:
            found = decide()
        except (ValueError, OSError) as error:
            refused = error
    found = _agreed(found)
    if found == -1:
        raise refused or CheckpointError("the first process rejected the checkpoint: see its error")
    return found
