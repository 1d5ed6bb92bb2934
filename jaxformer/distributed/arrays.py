"""Arrays of several processes: rows that each of them has built, and whole arrays for each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec, Sharding

from jaxformer.distributed.gathering import BATCH_AXES
from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten


def row_spec(leaf: Any) -> PartitionSpec:
    """The spec of a leaf of a batch: its rows are divided; a scalar is not."""
    return PartitionSpec(BATCH_AXES) if jnp.ndim(leaf) else PartitionSpec()


def check_rows(batch: Any, num_shards: int, grad_accumulation: int = 1, share: float = 1.0) -> None:
    """Raises `ConfigError` for rows that shards times parts of the batch do not divide.

    A leaf has 1 / `share` of the rows of the global batch.
    """
    need = num_shards * grad_accumulation
    for path, leaf in flatten(batch).items():
        rows = int(leaf.shape[0] * share) if jnp.ndim(leaf) else 0
        if rows % need:
            raise ConfigError(
                f"{path} has {rows} rows, but {num_shards} shards x grad_accumulation="
                f"{grad_accumulation} need a multiple of {need}: change one of the three"
            )


def global_array(
    leaf: Any, sharding: Sharding, local_shards: tuple[int, ...], num_shards: int
) -> jax.Array:
    """The array of all processes, of which this one has built the rows `leaf`.

    `local_shards` are the numbers of its shards among `num_shards`.
    """
    leaf = np.asarray(leaf)
    leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    if leaf.ndim == 0 or num_shards == 1:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
    size = len(leaf) // len(local_shards)
    shape = (size * num_shards, *leaf.shape[1:])

    def part(index: Any) -> np.ndarray:
        first = local_shards.index(index[0].indices(shape[0])[0] // size) * size
        return leaf[first : first + size]

    return jax.make_array_from_callback(shape, sharding, part)


def whole_array(leaf: Any) -> np.ndarray:
    """The whole array in numpy on every process; a PRNG key as its key data."""
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
