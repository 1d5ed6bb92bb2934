"""The rows of a batch, divided over the devices of a mesh and built by all of its processes."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Int

from jaxformer.distributed.gathering import BATCH_AXES
from jaxformer.distributed.mesh import standardize
from jaxformer.errors import ConfigError
from jaxformer.text.data import RowSelection, fill_rows
from jaxformer.text.data.batches import count_rows, pad_rows
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import Batch


class DividedRows:
    """A mesh whose axes data and fsdp divide the rows of a batch.

    Attributes:
      mesh: the devices that programs are compiled for.
      num_shards: into how many parts the rows of a batch are divided.
      local_shards: the indices of the parts that devices of this process hold.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh: Mesh = standardize(mesh)
        self.num_shards: int = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        groups = self.mesh.devices.reshape(self.num_shards, -1)
        here = jax.process_index()
        self.local_shards: tuple[int, ...] = tuple(
            i for i, group in enumerate(groups) if any(d.process_index == here for d in group)
        )

    def local_rows(self, batch_size: int) -> Int[np.ndarray, " R"]:
        """The ascending indices of the rows of a global batch that this process has to build.

        One process builds all rows. Several processes build different rows, except where a mesh
        divides the work on one row among them. Raises `ConfigError` when `num_shards` does not
        divide `batch_size`.
        """
        if batch_size % self.num_shards:
            raise ConfigError(
                f"a batch has {batch_size} rows, but {self.num_shards} shards need a multiple of "
                f"{self.num_shards}: change one of the two"
            )
        size = batch_size // self.num_shards
        return np.concatenate([np.arange(size) + shard * size for shard in self.local_shards])

    def shard_batch(self, batch: Batch) -> Batch:
        """The global batch on the devices, from the rows that this process has built.

        `batch` holds scalars and numpy arrays [R, ...], the rows `local_rows(B)` of the global
        arrays [B, ...]. Raises `ConfigError` when `num_shards` does not divide B.
        """
        check_rows(batch, self.num_shards, share=self.num_shards / len(self.local_shards))
        local = self.local_shards, self.num_shards
        return jax.tree.map(
            lambda leaf: global_array(leaf, self._sharding(row_spec(leaf)), *local), batch
        )

    def make_batch(self, make: Callable[[RowSelection], Batch], parts: int = 1) -> Batch:
        """The global batch on the devices; every process calls `make` for its own rows.

        `make(rows)` returns the rows of a batch of B that rows(B) selects, such as
        `functools.partial(batches.batch, step)`. Empty rows fill the batch up, so that the devices
        share it evenly, each in `parts` (see `fill_rows`).
        """
        sizes = []

        def select(batch_size: int) -> Int[np.ndarray, " R"]:
            rows = self.local_rows(self._filled_size(batch_size, parts))
            sizes.append(len(rows))
            return rows[rows < batch_size]

        batch = make(select)
        if sizes:
            batch = fill_rows(batch, sizes[0])
        return self.shard_batch(batch)

    def abstract_batch(self, batch: Batch, parts: int = 1) -> Batch:
        """The result of `make_batch` for a `batch` of all rows, as `jax.ShapeDtypeStruct`."""
        return self.abstract_divided(fill_rows(batch, self._filled_size(count_rows(batch), parts)))

    def _filled_size(self, batch_size: int, parts: int) -> int:
        """The rows of a batch whose rows all devices share evenly, each in `parts`."""
        return _multiple(batch_size, self.num_shards * parts)

    def divide(self, batch: Batch, axes: tuple[str, ...] = BATCH_AXES) -> Batch:
        """The batch on the devices, its rows divided along mesh `axes`; each process has all rows.

        `batch` holds arrays [B, ...] and scalars. Rows of zeros make B a multiple of the parts.
        """
        if self.mesh.size == 1:
            return batch
        return self._divided(batch, axes, global_array)

    def abstract_divided(self, batch: Batch, axes: tuple[str, ...] = BATCH_AXES) -> Batch:
        """The result of `divide` as `jax.ShapeDtypeStruct`."""

        def describe(leaf: np.ndarray, sharding: Sharding) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

        return self._divided(batch, axes, describe)

    def _divided(
        self, batch: Batch, axes: tuple[str, ...], place: Callable[[np.ndarray, Sharding], Any]
    ) -> Batch:
        parts = math.prod(self.mesh.shape[axis] for axis in axes)

        def placed(leaf: Any) -> Any:
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                return leaf
            leaf = np.asarray(leaf)
            leaf = pad_rows(leaf, _multiple(len(leaf), parts)) if leaf.ndim else leaf
            return place(leaf, self._sharding(row_spec(leaf, axes)))

        return jax.tree.map(placed, batch)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Within it programs are compiled for these devices."""
        return jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext()

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        if self.mesh.size == 1:
            return SingleDeviceSharding(self.mesh.devices.item())
        return NamedSharding(self.mesh, spec)


def row_spec(leaf: Any, axes: tuple[str, ...] = BATCH_AXES) -> PartitionSpec:
    """The spec of a leaf of a batch: mesh `axes` divide its rows; a scalar is not divided."""
    return PartitionSpec(axes) if jnp.ndim(leaf) else PartitionSpec()


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
    leaf: Any, sharding: Sharding, local_shards: tuple[int, ...] = (0,), num_shards: int = 1
) -> jax.Array:
    """The array of all processes, of which this one has built the rows `leaf`; by default all.

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


def _multiple(count: int, parts: int) -> int:
    """The least multiple of `parts` that is at least `count`."""
    return -(-count // parts) * parts
