"""Training states on disk: written whole or not at all, restored exactly or refused."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_NAMED = 5  # parameters named in an error before the rest is only counted


class CheckpointError(ValueError):
    """No complete checkpoint, or one that does not fit what is asked of it."""


class Checkpoints:
    """The checkpoints of one run: `folder/STEP/`, each a state and its facts.

    The newest `keep` steps stay, and so does the step with the lowest metric. Reading never
    changes the folder, so a run that is still training may be read; one process at a time may
    write, and loses its last save if it ends without `close` or the end of a `with` block.
    Nothing is unpickled: arrays are stored by tensorstore, facts as JSON.
    """

    def __init__(self, folder: str | Path, *, keep: int = 5):
        if keep < 1:
            raise CheckpointError(f"keep={keep}, but at least 1 checkpoint must stay")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._writer: ocp.CheckpointManager | None = None

    def save(self, step: int, state: Any, facts: dict, metric: float | None = None) -> None:
        """Begins to write `state` and `facts` as `step`, and returns before all is on disk.

        `state` is any pytree of arrays, numbers, typed PRNG keys and None; `facts` is JSON. The
        lowest `metric` is the best (a loss; negate a score); NaN is never best. A step that is
        already complete stays as it is. Raises `OSError` if this or the previous write failed.
        """
        try:
            json.dumps(facts)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"facts must be JSON, but {error}: give plain values") from error
        if self._writer is None:
            options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
            self._writer = ocp.CheckpointManager(self.folder, options=options)
        self.wait()
        if step in self.steps():
            return
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(jax.tree.map(_storable, state)),
            facts=ocp.args.JsonSave({"facts": facts, "metric": metric}),
        )
        with _writing(self.folder):
            self._writer.save(step, args=items, force=True)

    def wait(self) -> None:
        """Returns when every save is on disk and what is not to be kept is gone."""
        if self._writer is None:
            return
        try:
            with _writing(self.folder):
                self._writer.wait_until_finished()
                self._prune()
        finally:
            self._writer.reload()  # it still lists what failed or was pruned

    def close(self) -> None:
        """Waits as `wait` does and ends the writing threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The complete steps, ascending; one still being written is not among them."""
        if not self.folder.is_dir():
            return []
        named = (entry for entry in self.folder.iterdir() if entry.name.isdecimal())
        return sorted(
            int(entry.name) for entry in named if (entry / "_CHECKPOINT_METADATA").is_file()
        )

    def best_step(self) -> int | None:
        """The complete step with the lowest metric, the newer of equals; None if none has one."""
        metrics = {step: self._metric(step) for step in self.steps()}
        scored = [(m, -step) for step, m in metrics.items() if m is not None and m == m]
        return -min(scored)[1] if scored else None

    def facts(self, step: int | None = None) -> dict:
        """The facts saved with `step` (the newest when None)."""
        return self._note(self._complete(step))["facts"]

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """The state and facts of `step` (the newest when None), in the shape of `abstract_state`.

        A leaf of `abstract_state` is an array or a `jax.ShapeDtypeStruct`; where its sharding
        spans several devices, the restored leaf gets it. Raises `CheckpointError`, naming the
        parameters, if one is missing, left over, or of another shape or dtype.
        """
        step = self._complete(step)
        target = jax.tree.map(_stored_as, abstract_state)
        self._compare(target, step)
        state = self._read(step, target, jax.tree.map(_restore_args, target), partial=False)
        return jax.tree.map(_as_given, abstract_state, state), self._note(step)["facts"]

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

    def _prune(self) -> None:
        """Removes what is neither among the newest nor the best, each step at one stroke."""
        if jax.process_index() != 0:
            return
        trash = self.folder / "trash"
        shutil.rmtree(trash, ignore_errors=True)
        steps = self.steps()
        for step in set(steps[: -self._keep]) - {self.best_step()}:
            trash.mkdir(exist_ok=True)
            (self.folder / str(step)).rename(trash / str(step))
        shutil.rmtree(trash, ignore_errors=True)

    def _complete(self, step: int | None) -> int:
        """`step` if it is complete, or the newest complete step when it is None."""
        self.wait()
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"there is no complete checkpoint in {self.folder}: train first")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"there is no complete checkpoint of step {step} in {self.folder}: "
                f"it has {', '.join(map(str, steps))}"
            )
        return steps[-1] if step is None else step

    def _metric(self, step: int) -> float | None:
        try:
            return self._note(step)["metric"]
        except CheckpointError:
            return None  # a damaged step is not the best, and must not stop the training

    def _note(self, step: int) -> dict:
        path = self.folder / str(step) / "facts"
        with _reading(path):
            return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(path)

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

    def _compare(self, target: Any, step: int) -> None:
        """Refuses a target that orbax would cast, or would reject without a name."""
        given, stored = _shapes(target), _shapes(self._stored(step))
        wrong = [
            f"{path} is {stored.get(path, 'absent')} in the checkpoint but "
            f"{given.get(path, 'absent')} here"
            for path in sorted(given.keys() | stored.keys(), key=_params_first)
            if given.get(path) != stored.get(path)
        ]
        if wrong:
            more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise CheckpointError(
                f"{self.folder / str(step)} does not fit this model and optimizer: "
                f"{'; '.join(wrong[:_NAMED])}{more}. Use the settings it was trained with"
            )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # orbax raises as many kinds as there are file systems
        raise OSError(f"a checkpoint could not be written to {folder}: {error}") from error


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaf: Any) -> jax.Array | np.ndarray:
    """`leaf` as an array of numbers: a typed PRNG key as its key data."""
    if not hasattr(leaf, "dtype"):
        return jnp.asarray(leaf)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _spread(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding of a leaf on several devices; on one, JAX shall choose the device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and len(sharding.device_set) > 1 else None


def _stored_as(leaf: Any) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_spread(leaf))


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)


def _as_given(leaf: Any, value: Any) -> jax.Array:
    if not hasattr(leaf, "dtype") or not _is_key(leaf):
        return value if isinstance(value, jax.Array) else jnp.array(value)
    impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
    keys = jax.random.wrap_key_data(jnp.array(value), impl=impl)
    return keys if _spread(leaf) is None else jax.device_put(keys, leaf.sharding)


def _params_first(path: str) -> tuple[bool, str]:
    return not path.startswith("params/"), path


def _shapes(tree: Any) -> dict[str, str]:
    """`path/of/leaf` -> `dtype[shape]`."""
    return {
        path: f"{jnp.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()
    }
