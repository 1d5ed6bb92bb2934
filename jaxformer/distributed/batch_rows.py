"""The rows of a batch on a mesh: how they are divided, and arrays of all processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from jaxformer.distributed.mesh import BATCH_AXES
from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten


def row_spec(leaf: Any, axes: tuple[str, ...] = BATCH_AXES) -> PartitionSpec:
    """The spec of a leaf of a batch: mesh `axes` divide its rows; a scalar is not divided."""
    return PartitionSpec(axes) if jnp.ndim(leaf) else PartitionSpec()


def check_rows(batch: Any, num_shards: int, grad_accumulation: int = 1, share: float = 1.0) -> None:
    """Raises `ConfigError` for rows that shards times parts of the batch do not divide.

    A leaf has 1 / `share` of the rows of the global batch.
    """
    need = num_shards * grad_accumulation
    for path, leaf in flatten(batch).items():
        rows = round(leaf.shape[0] * share) if jnp.ndim(leaf) else 0
        if rows % need:
            raise ConfigError(
                f"{path} has {rows} rows, but {num_shards} shards x grad_accumulation="
                f"{grad_accumulation} need a multiple of {need}: change one of the three"
            )


def global_array(leaf: Any, sharding: Sharding, share: float = 1.0) -> jax.Array:
    """The array of all processes; this one has built 1 / `share` of its rows, in their order."""
    leaf = np.asarray(leaf)
    leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    shape = (round(len(leaf) * share), *leaf.shape[1:]) if leaf.ndim else ()
    return jax.make_array_from_process_local_data(sharding, leaf, shape)
