"""The checkpoints of a run: saved in the background, committed, verified, pruned."""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxformer import storage
from jaxformer.checkpoint import manifest
from jaxformer.checkpoint.leaves import (
    PIECE,
    Shardings,
    as_given,
    read_mean,
    reading,
    restore_args,
    storable,
    stored_arrays,
    stored_shape,
)
from jaxformer.checkpoint.lock import Lock, lock
from jaxformer.checkpoint.steps import StepFolders, on_process_zero
from jaxformer.distributed.processes import agreed
from jaxformer.errors import CheckpointError, ConfigError, listed
from jaxformer.training.lora import merge_adapters

_FULL = os.strerror(errno.ENOSPC)
# Bytes on disk beside the numbers, as measured with 1 to 1,000 arrays.
_OF_EACH_STEP = 45_000
_OF_EACH_ARRAY = 2_000


class _Decision(IntEnum):
    """The first process's decision about a step to be saved."""

    SAVE = 0
    IS_SAVED = 1
    NO_ROOM = 2


class Checkpoints:
    """The checkpoints of one run: `folder/STEP/` holds a state and a manifest that commits it.

    The folder may be in a bucket, gs://bucket/path (extra `gcs`).
    Only a committed step counts, and it is read only if every file has the length and the CRC-32
    of its manifest. The newest `keep` regular steps are kept, the newest step and the one with the
    lowest metric. Nothing is unpickled: arrays are stored by tensorstore, metadata as JSON.

    Reading never changes the folder, so a run that is still training can be read. Only one run at a
    time can write: entering a `with` block, or the first `save`, locks the folder until the end of
    the block, `close`, or the end of the process; in a bucket, a process that was killed on another
    host keeps it for ten minutes. A damaged step is skipped with a warning; it stays until it is
    saved again or a newer one is. A process that ends without `close` may lose its last save.

    >>> with jf.Checkpoints("checkpoints") as checkpoints:
    ...     checkpoints.save(100, {"scale": jnp.ones(3)}, metric=2.5)
    ...     checkpoints.save(200, {"scale": jnp.zeros(3)}, metric=2.7)
    >>> checkpoints.steps(), checkpoints.best_step()
    ([100, 200], 100)
    >>> state, _ = checkpoints.restore({"scale": jnp.ones(3)})  # the newest
    >>> state["scale"]
    Array([0., 0., 0.], dtype=float32)
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 5):
        if keep < 1:
            raise CheckpointError(f"keep={keep}, but it must be at least 1")
        self.folder: Path = storage.to_path(folder).absolute()
        self._keep = keep
        self._steps = StepFolders(self.folder)
        self._lock: Lock | None = None
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._committing: Future | None = None
        self._is_writing = False

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any] | None = None,
        metric: float | None = None,
        *,
        regular: bool = True,
    ) -> None:
        """Starts to write `state` as `step`; returns before everything is on disk.

        `state` is any pytree of arrays, numbers, typed PRNG keys and None. `metadata` is any dict
        that JSON can hold. The lowest `metric` is the best (a loss; negate a score); one that is
        not finite is none. A step that is not `regular` does not count among the `keep`. A step
        that is already committed is not changed.

        Raises `OSError` if this write or the previous one failed, `ConfigError` while another run
        writes to the folder or after it has taken it over, and `CheckpointError` if there are steps
        and none of them is intact.
        """
        try:
            plain = json.loads(json.dumps(metadata or {}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata must be JSON, use plain values: {error}") from error
        self._open()
        self.wait()
        decision = on_process_zero(lambda: self._decide(step, state))
        if decision == _Decision.IS_SAVED:
            return
        self._steps.forget(step)
        leaves = manifest.describe(jax.tree.map(stored_shape, state))
        content = manifest.Manifest(leaves, plain, _finite(metric), regular, {})
        arrays = jax.tree.map(storable, state)
        pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=PIECE), arrays)
        stored = ocp.args.PyTreeSave(arrays, save_args=pieces)
        with self._writing():
            if decision == _Decision.NO_ROOM:  # once begun, each library would say it on its own
                raise OSError(errno.ENOSPC, _FULL)
            assert self._writer is not None and self._thread is not None
            items = ocp.args.Composite(state=stored)
            self._is_writing = True
            try:
                self._writer.save(str(self._steps.path(step)), args=items, force=True)
                self._committing = self._thread.submit(self._finish, step, content)
            finally:
                self._is_writing = False

    def annotate(self, step: int, metadata: dict[str, Any], metric: float | None = None) -> None:
        """Adds `metadata` and the `metric` to `step`, such as its validation's.

        Waits for the save of this step. No-op where that save has failed.
        """
        self.wait()
        path = self._steps.path(step)
        if jax.process_index() or not self._steps.is_committed(step):
            return
        saved = manifest.read(path)
        with self._writing():
            self._check_lock()
            manifest.write(
                path, saved._replace(metadata=saved.metadata | metadata, metric=_finite(metric))
            )

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not committed yet; any thread may ask."""
        committing = self._committing
        return self._is_writing or (committing is not None and not committing.done())

    def wait(self) -> bool:
        """Returns when every save is committed and old steps are removed.

        Whether there was a save to wait for. Raises `OSError` if it has failed.
        """
        committing = self._committing
        if committing is None:
            return False
        with self._writing():
            error = committing.exception()
            self._committing = None
            committed = agreed(error is None)  # only the first process commits
            if error is not None:
                raise error
            if not committed:
                raise OSError("the first process has failed: see its error")
        return True

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
        if kind is None:
            self.close()
            return
        # The error that ends the block is raised; a failure to close may be its consequence. Other
        # processes may still be in a step: nothing is agreed with them.
        with suppress(Exception):
            self._release()

    def steps(self) -> list[int]:
        """The committed steps whose files have the right lengths, ascending."""
        return list(self._steps.complete())

    def newest_step(self) -> int | None:
        """The newest step whose bytes are all intact; None if no step is committed.

        Warns about each damaged step that is newer. Raises `CheckpointError`, with a reason for
        each, if there are committed steps but none is intact.
        """
        return self._steps.newest()

    def best_step(self) -> int | None:
        """The committed step with the lowest metric, the newest of equals; None if none has one."""
        return self._steps.best()

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
        step = on_process_zero(lambda: self._verified_step(step))
        target = jax.tree.map(stored_shape, abstract_state)
        saved = manifest.read(self._steps.path(step))
        wrong = manifest.differences(saved.leaves, manifest.describe(target))
        if wrong:
            raise CheckpointError(
                f"{self._steps.path(step)} does not fit this model and optimizer: "
                f"{listed(wrong)}. Use the settings that it was trained with"
            )
        path = self._steps.path(step) / "state"
        request = ocp.args.PyTreeRestore(
            target, restore_args=jax.tree.map(restore_args, target), partial_restore=False
        )
        # Arrays are to be moved to devices, whatever the caller forbids by a guard.
        with reading(path), jax.transfer_guard("allow"):
            state = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(str(path), args=request)
            return jax.tree.map(as_given, abstract_state, state), saved.metadata

    def param_shapes(self, step: int | None = None, *, tree: str = "params") -> Any:
        """The shapes that `average_params` returns, as `jax.ShapeDtypeStruct`."""
        arrays = stored_arrays(self._steps.path(self._verified_step(step)) / "state", tree)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
        return jax.eval_shape(merge_adapters, shapes)

    def average_params(
        self,
        steps: Iterable[int],
        *,
        tree: str = "params",
        shardings: Shardings | None = None,
    ) -> dict[str, Any]:
        """The mean of the field `tree` of the states of `steps`, in the stored dtype.

        The result is nested dicts of numpy arrays. With `shardings`, such as a `Strategy`'s,
        the arrays are read to the devices that `shardings(tree of shapes)` says. Either way the
        host holds, besides the result, a part of one array. The mean is summed in float64; Vaswani
        et al. 2017, section 6.1, average the last 5 (base) or 20 (big) checkpoints. Adapters are
        averaged, and then merged (see `merge_adapters`).
        """
        return merge_adapters(self.average_unmerged(steps, tree=tree, shardings=shardings))

    def average_unmerged(
        self,
        steps: Iterable[int],
        *,
        tree: str = "params",
        shardings: Shardings | None = None,
    ) -> dict[str, Any]:
        """As `average_params`, with adapters beside their matrices."""
        states = [self._steps.path(self._verified_step(step)) / "state" for step in steps]
        if not states:
            raise CheckpointError("steps is empty, but an average needs at least one step")
        return read_mean(states, tree, shardings)

    def _open(self) -> None:
        """Locks the folder, removes what a killed process left and skips damaged steps."""

        def lock_and_clear() -> int | None:
            self._lock = lock(self.folder)
            newest = self.newest_step()
            self._steps.check_uncommitted(newest)
            self._steps.clear()
            return newest

        if self._writer is not None:
            return
        try:
            newest = on_process_zero(lock_and_clear)
            self._steps.skip_newer(-1 if newest is None else newest)
        except BaseException:
            self._release()
            raise
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_raised)
        self._writer = _make_writer(self.folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")

    def _recover(self) -> None:
        """After a failed write: makes a new writer and removes the unfinished files."""
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()  # otherwise the next save would raise this failure again
        self._writer = _make_writer(self.folder)
        if jax.process_index() == 0:
            self._steps.clear()

    def _release(self) -> None:
        with ExitStack() as ending:  # last in, first out; each runs even if another fails
            for resource in (self._lock, self._writer):
                if resource is not None:
                    ending.callback(resource.close)
            if self._thread is not None:
                ending.callback(self._thread.shutdown)
        self._writer = self._lock = self._thread = self._committing = None

    def _finish(self, step: int, content: manifest.Manifest) -> None:
        """In the background: commits what orbax has written, then removes old steps."""
        assert self._writer is not None
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            manifest.commit(self._steps.path(step), content, self._check_lock)
            self._steps.prune(self._keep)

    def _decide(self, step: int, state: Any) -> _Decision:
        self._check_lock()
        if step in self.steps():
            return _Decision.IS_SAVED
        if self._steps.is_committed(step):  # but damaged
            self._steps.remove(step)
        shapes = jax.tree.leaves(jax.tree.map(stored_shape, state))
        size = sum(x.size * x.dtype.itemsize + _OF_EACH_ARRAY for x in shapes) + _OF_EACH_STEP
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        if storage.is_in_bucket(self.folder) or shutil.disk_usage(self.folder).free >= size:
            return _Decision.SAVE
        return _Decision.NO_ROOM

    def _check_lock(self) -> None:
        """Raises `ConfigError` if another run has taken the folder over."""
        if self._lock is not None:
            self._lock.check()

    def _verified_step(self, step: int | None) -> int:
        """`step` if it is intact; the newest intact step if it is None."""
        self.wait()
        if step is None:
            step = self.newest_step()
            if step is None:
                raise CheckpointError(
                    f"there is no committed checkpoint in {self.folder}: train first"
                )
        elif not self._steps.is_committed(step):
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"there is no committed checkpoint of step {step} in {self.folder}: it has {there}"
            )
        self._steps.verify(step)
        return step

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise  # another run writes here now: leave its files alone
        except jax.errors.JaxRuntimeError:
            self._recover()
            raise  # the step that computed the state has failed, not the disk
        except Exception as error:  # orbax raises many kinds of errors
            self._recover()
            has_no_room = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if has_no_room or _FULL in str(error):
                message = f"a checkpoint could not be written, {_FULL}: free some, and start again"
                raise OSError(errno.ENOSPC, message, str(self.folder)) from error
            message = f"a checkpoint could not be written to {self.folder}: {error}"
            raise OSError(message) from error


def _make_writer(folder: Path) -> ocp.AsyncCheckpointer:
    """Orbax's writer of checkpoints.

    It renames a folder that is complete; in a bucket, where nothing can be renamed, it adds a file.
    """
    path_class = None
    if storage.is_in_bucket(folder):
        path_class = ocp.path.atomicity.CommitFileTemporaryPath
    options = ocp.CompositeOptions(temporary_path_class=path_class)
    handler = ocp.CompositeCheckpointHandler(composite_options=options)
    return ocp.AsyncCheckpointer(handler, temporary_path_class=path_class)


def _is_not_raised(record: logging.LogRecord) -> bool:
    """False for a line of a log about a failed save: orbax raises that error, too."""
    return not (record.exc_info and "orbax" in f"{record.pathname} {record.getMessage()}")


def _finite(metric: float | None) -> float | None:
    return None if metric is None or not math.isfinite(metric) else float(metric)
