"""The checkpoints of a run: saved in the background, sealed, verified, kept or set aside."""

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

from jaxformer.checkpoint import manifest, trees
from jaxformer.checkpoint.claim import claim
from jaxformer.checkpoint.manifest import CheckpointError

_UNFINISHED = "*.orbax-checkpoint-tmp*"
_SET_ASIDE = "corrupt-"


class Checkpoints:
    """The checkpoints of one run: `folder/STEP/`, each a state sealed by its manifest.

    A step counts only when it is sealed, and is read only when each of its files has the length
    and the CRC-32 that it was sealed with. The newest `keep` steps stay, and so does the step with
    the lowest metric. Reading never changes the folder, so a run that is still training may be
    read. One run at a time may write: a `with` block, or else the first `save`, claims the folder
    until the end of the block, `close`, or the end of the process. Claiming sets a damaged step
    aside as `corrupt-STEP`, with a warning. A process that ends without closing may lose its
    last save. Nothing is unpickled: arrays are stored by tensorstore, facts as JSON. Where a disk
    is full for a while, `save` only warns, until `patience` saves in a row have failed.
    """

    def __init__(self, folder: str | Path, *, keep: int = 5, patience: int = 1):
        for name, number in (("keep", keep), ("patience", patience)):
            if number < 1:
                raise CheckpointError(f"{name}={number}, but it must be at least 1")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._patience, self._failed = patience, 0
        self._lock: TextIO | None = None
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._sealing: Future | None = None
        self._verified: set[int] = set()

    def save(self, step: int, state: Any, facts: dict, metric: float | None = None) -> None:
        """Begins to write `state` and `facts` as `step`, and returns before all is on disk.

        `state` is any pytree of arrays, numbers, typed PRNG keys and None; `facts` is JSON. The
        lowest `metric` is the best (a loss; negate a score); NaN is never best. A step that is
        already complete stays as it is. Raises `OSError` if this or the previous write failed as
        the last of `patience`, and what claiming the folder raises: `ConfigError` while another
        run writes there, `CheckpointError` if there are steps and none of them is intact.
        """
        try:
            facts = json.loads(json.dumps(facts))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"facts must be JSON, but {error}: give plain values") from error
        self._open()
        with self._patiently():
            self.wait()
        if _agreed(step in self.steps()):
            return
        leaves = trees.shapes(jax.tree.map(trees.stored_as, state))
        stored = ocp.args.PyTreeSave(jax.tree.map(trees.storable, state))
        metric = None if metric is None or metric != metric else float(metric)
        with self._patiently(), self._writing():
            items = ocp.args.Composite(state=stored)
            self._writer.save(self.folder / str(step), args=items, force=True)
            self._sealing = self._thread.submit(self._finish, step, leaves, facts, metric)

    def wait(self) -> None:
        """Returns when every save is sealed and what is not to be kept is gone.

        Raises `OSError` if the last one failed.
        """
        if self._sealing is None:
            return
        sealing, self._sealing = self._sealing, None
        with self._writing():
            error = sealing.exception()
            sealed = _agreed(error is None)  # only the first process seals: now all know
            if error is not None:
                raise error
            if not sealed:
                raise OSError("the first process has failed: see its error")
        self._failed = 0

    def close(self) -> None:
        """Waits as `wait` does, ends the writing threads and gives the folder free."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> "Checkpoints":
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What fails while an error passes through may be its consequence: the error itself is told.
        with suppress(Exception) if kind is not None else nullcontext():
            self.close()

    def steps(self) -> list[int]:
        """The sealed steps whose files have their lengths, ascending."""
        return [step for step in self._numbered() if self._note(step) is not None]

    def newest_step(self) -> int | None:
        """The newest step that is intact to the byte; None in a folder without sealed steps.

        Warns of each damaged one that it passed over. Raises `CheckpointError`, with the reason
        for each, if there are sealed steps but none is intact.
        """
        damaged, found = {}, None
        for step in reversed(self._numbered()):
            if not manifest.is_sealed(self.folder / str(step)):
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
                "was deleted: restore one from a copy, or use another folder to start from zero"
            )
        for step, reason in damaged.items():
            there = f"it is now {self._set_aside(step)}" if self._lock else "it is passed over"
            warnings.warn(f"{reason}; {there}, and step {found} is used", stacklevel=2)
        return found

    def best_step(self) -> int | None:
        """The complete step with the lowest metric, the newer of equals; None if none has one."""
        notes = {step: self._note(step) for step in self._numbered()}
        scored = [
            (note.metric, -step)
            for step, note in notes.items()
            if note is not None and note.metric is not None
        ]
        return -min(scored)[1] if scored else None

    def facts(self, step: int | None = None) -> dict:
        """The facts saved with `step` (the newest intact one when None)."""
        return manifest.read(self.folder / str(self._complete(step))).facts

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """The state and facts of `step` (the newest intact one when None), like `abstract_state`.

        A leaf of `abstract_state` is an array or a `jax.ShapeDtypeStruct`; where its sharding
        spans several devices, the restored leaf gets it, whatever it was saved from. Raises
        `CheckpointError`, naming the parameters, if one is missing, left over, or of another shape
        or dtype, before anything is loaded.
        """
        step = _by_the_first(lambda: self._complete(step))
        target = jax.tree.map(trees.stored_as, abstract_state)
        note = manifest.read(self.folder / str(step))
        wrong = trees.differences(note.leaves, trees.shapes(target))
        if wrong:
            raise CheckpointError(
                f"{self.folder / str(step)} does not fit this model and optimizer: {wrong}. Use "
                "the settings it was trained with"
            )
        state = self._read(step, target, jax.tree.map(trees.restore_args, target), partial=False)
        return jax.tree.map(trees.as_given, abstract_state, state), note.facts

    def restore_params(self, step: int | None = None, *, tree: str = "params") -> dict:
        """The subtree `tree` of the state of `step`, a nested dict of numpy arrays."""
        step = self._complete(step)
        stored = self._stored(step)
        if not isinstance(stored, dict) or not stored.get(tree):
            raise CheckpointError(f"{self.folder / str(step)} holds no {tree!r}")
        target = {tree: stored[tree]}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
        return self._read(step, target, as_numpy, partial=True)[tree]

    def average_params(self, steps: Iterable[int], *, tree: str = "params") -> dict:
        """The mean of the `tree` of `steps`, summed in float64, in the dtype they are stored in.

        Vaswani et al. 2017, section 6.1, average the last 5 (base) or 20 (big) checkpoints.
        """
        steps = list(steps)
        if not steps:
            raise CheckpointError(f"an average needs at least one step of {self.folder}")
        first = self.restore_params(steps[0], tree=tree)
        total = jax.tree.map(lambda leaf: leaf.astype(np.float64), first)
        for step in steps[1:]:
            total = jax.tree.map(np.add, total, self.restore_params(step, tree=tree))
        return jax.tree.map(lambda s, leaf: (s / len(steps)).astype(leaf.dtype), total, first)

    def _open(self) -> None:
        """Claims the folder, clears what a kill left there and sets aside what is damaged."""
        if self._writer is not None:
            return
        try:
            _by_the_first(self._begin)
        except (ValueError, OSError):
            self._release()
            raise
        self._writer = _make_writer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seal")

    def _begin(self) -> int:
        self._lock = claim(self.folder)
        newest = self.newest_step()
        unsealed = [n for n in self._numbered() if not manifest.is_sealed(self.folder / str(n))]
        unfinished = unsealed or list(self.folder.glob(_UNFINISHED))
        if newest is not None:
            for step in [n for n in unsealed if n > newest]:
                said = f"{self.folder / str(step)} was never sealed, so it does not count"
                warnings.warn(f"{said}, and step {newest} is used", stacklevel=4)
        elif len(unsealed) > 1 or any(self.folder.glob(f"{_SET_ASIDE}*")):
            # One save cannot have left this: training from zero would be a silent loss.
            raise CheckpointError(
                f"no checkpoint in {self.folder} is sealed, though it was trained in: restore one "
                "from a copy, or use another folder to start from zero"
            )
        elif unfinished:
            said = f"the first checkpoint in {self.folder} was never sealed"
            warnings.warn(f"{said}: there is nothing to resume, start from zero", stacklevel=4)
        self._clear()
        return 0

    def _recover(self) -> None:
        """After a failed write: a writer without its errors, a disk without its files."""
        with suppress(Exception):
            self._writer.close()  # it would tell of this failure again in place of the next save
        self._writer = _make_writer()
        if jax.process_index() == 0:
            self._clear()

    def _release(self) -> None:
        with ExitStack() as ending:  # last in, first out, each though another fails
            for resource in (self._lock, self._writer):
                if resource is not None:
                    ending.callback(resource.close)
            if self._thread is not None:
                ending.callback(self._thread.shutdown)
        self._writer = self._lock = self._thread = None

    def _finish(self, step: int, leaves: dict, facts: dict, metric: float | None) -> None:
        """In the background: seals what orbax has committed, then removes what is not kept."""
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            manifest.seal(self.folder / str(step), leaves, facts, metric)
            self._prune()

    def _prune(self) -> None:
        """Removes what is neither among the newest nor the best, each step at one stroke."""
        trash = self.folder / "trash"
        steps = self.steps()
        for step in set(steps[: -self._keep]) - {self.best_step()}:
            trash.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(trash / str(step))
            self._verified.discard(step)
        shutil.rmtree(trash, ignore_errors=True)

    def _clear(self) -> None:
        """Removes what a save or a removal left unfinished."""
        shutil.rmtree(self.folder / "trash", ignore_errors=True)
        for path in self.folder.glob(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, step: int) -> str:
        names = (f"{_SET_ASIDE}{step}{end}" for end in _endings())
        name = next(name for name in names if not (self.folder / name).exists())
        (self.folder / str(step)).rename(self.folder / name)
        self._verified.discard(step)
        return name

    def _numbered(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (entry.name for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _note(self, step: int) -> manifest.Manifest | None:
        """The manifest of a sealed step whose files have their lengths."""
        folder = self.folder / str(step)
        try:
            note = manifest.read(folder)
            manifest.check_lengths(folder, note)
        except CheckpointError:
            return None
        return note

    def _verify(self, step: int) -> None:
        """Raises `CheckpointError` unless every byte of `step` is the one that was sealed."""
        if step not in self._verified:
            folder = self.folder / str(step)
            manifest.check(folder, manifest.read(folder))
            self._verified.add(step)

    def _complete(self, step: int | None) -> int:
        """`step` if it is intact, or the newest intact step when it is None."""
        self.wait()
        if step is None:
            step = self.newest_step()
            if step is None:
                raise CheckpointError(
                    f"there is no complete checkpoint in {self.folder}: train first"
                )
        elif not manifest.is_sealed(self.folder / str(step)):
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"there is no complete checkpoint of step {step} in {self.folder}: it has {there}"
            )
        self._verify(step)
        return step

    def _stored(self, step: int) -> Any:
        """What is stored: a tree of dicts and lists whose leaves know shape and dtype."""
        path = self.folder / str(step) / "state"
        with _reading(path):
            return ocp.PyTreeCheckpointHandler().metadata(path).tree

    def _read(self, step: int, target: Any, restore_args: Any, *, partial: bool) -> Any:
        path = self.folder / str(step) / "state"
        request = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=partial)
        with _reading(path):
            return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path, args=request)

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed += 1
            if self._failed >= self._patience:
                raise
            left = self._patience - self._failed
            said = f"{error}; the next save tries again, and after {left} more failures it ends"
            warnings.warn(said, stacklevel=4)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self._recover()
            raise  # the step that made the state has failed, not the disk
        except Exception as error:  # orbax raises as many kinds as there are file systems
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
    except ValueError as error:  # as which `jax.jit` tells of a process that is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error


def _by_the_first(decide: Callable[[], int]) -> int:
    """What `decide()`, at least 0, gives in the first process; what it refuses, all refuse."""
    found, refused = -1, None
    if jax.process_index() == 0:
        try:
            found = decide()
        except (ValueError, OSError) as error:
            refused = error
    found = _agreed(found)
    if found == -1:
        raise refused or CheckpointError("the first process refused the checkpoint: see its error")
    return found


def _endings() -> Iterator[str]:
    """What makes a name that is taken another one: nothing, -2, -3, ..."""
    yield ""
    yield from (f"-{number}" for number in itertools.count(2))
