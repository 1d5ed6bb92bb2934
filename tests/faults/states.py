"""States whose every byte follows from their step, so that no copy of one need be kept."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoint import Checkpoints


def make_state(step: int) -> dict:
    """About 300 kB of numbers that do not compress, as parameters, an optimizer and a key."""
    draw = np.random.default_rng(step).standard_normal
    params = {"kernel": draw((97, 389), np.float32), "bias": draw(389, np.float32)}
    moments = {"count": np.int32(step), "mu": draw((97, 389), np.float32)}
    return {
        "step": jnp.int32(step),
        "params": jax.tree.map(jnp.asarray, params),
        "opt_state": jax.tree.map(jnp.asarray, moments),
        "rng": jax.random.key(step),
    }


def as_bytes(tree: Any) -> list[bytes]:
    """The bytes of every leaf; of a key, those of its data."""

    def raw(leaf: Any) -> bytes:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return [raw(leaf) for leaf in jax.tree.leaves(tree)]


def save(checkpoints: Checkpoints, step: int) -> None:
    """Begins to save the state of `step`; the later, the better its metric."""
    checkpoints.save(step, make_state(step), {"step": step}, -float(step))


def is_right(checkpoints: Checkpoints, step: int | None = None) -> bool:
    """Whether the restored state and metadata are those saved under their step."""
    state, metadata = checkpoints.restore(make_state(0), step)
    expected = metadata["step"] if step is None else step
    return metadata == {"step": expected} and as_bytes(state) == as_bytes(make_state(expected))


def make_folder(folder: str | Path, steps: tuple[int, ...]) -> None:
    """A folder with committed checkpoints of `steps`."""
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            save(checkpoints, step)
