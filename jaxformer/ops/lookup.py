"""Rows of a table whose rows are divided over devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxformer.config.table_rows import take_rows
from jaxformer.ops.dense import QuantizedMatrix
from jaxformer.ops.manual_axes import check_differentiable
from jaxformer.ops.masks import AnyArray
from jaxformer.ops.partitioning import POSITION_AXES, partitioned


def lookup(
    table: Float[Array, "V D"] | QuantizedMatrix, ids: Int[AnyArray, "*shape"], dtype: Any
) -> Float[Array, "*shape D"]:
    """The rows `ids` of `table` in `dtype`; the plain twin is `table[ids].astype(dtype)`.

    A row is NaN where an id is none of the table's. Where the mesh axis "tensor" divides the
    vocabulary, the rows of ids [B, T] are rounded before devices send them, and each device gets
    its own positions'. The gradient of the table is added up in the type of `table`.

    >>> lookup(jnp.arange(6.0).reshape(3, 2), jnp.array([[2, 0]]), jnp.bfloat16)
    Array([[[4, 5],
            [0, 1]]], dtype=bfloat16)
    """
    if isinstance(table, QuantizedMatrix):
        return table.rows(ids).astype(dtype)
    axes = partitioned()
    parts = axes.get("tensor", 1)
    is_divided = parts > 1 and len(table) % parts == 0
    if is_divided and ids.ndim == 2 and ids.shape[1] % math.prod(axes.values()) == 0:
        return _lookup_of_positions(table, jnp.asarray(ids), dtype)
    return take_rows(table, jnp.asarray(ids)).astype(dtype)


def _lookup_of_positions(
    table: Float[Array, "V D"], ids: Int[Array, "B T"], dtype: Any
) -> Float[Array, "B T D"]:
    check_differentiable((table, ids))
    vocabulary = len(table)

    def sum_own_rows(part: jax.Array, ids: jax.Array) -> jax.Array:
        ids = jnp.where(ids < 0, ids + vocabulary, ids)  # as an index of numpy
        is_in_table = (ids >= 0) & (ids < vocabulary)
        places = ids - jax.lax.axis_index("tensor") * len(part)
        is_own = (places >= 0) & (places < len(part))
        rows = jnp.take(part, jnp.where(is_own, places, 0), axis=0).astype(dtype)
        other = jnp.where(is_in_table, 0, jnp.nan).astype(dtype)
        rows = jnp.where(is_own[..., None], rows, other[..., None])
        return jax.lax.platform_dependent(rows, cpu=_scatter_on_cpu, default=_scatter)

    names = tuple(name for name, size in partitioned().items() if size > 1)
    own_ids = PartitionSpec(None, "sequence" if "sequence" in names else None)
    own_positions = PartitionSpec(None, tuple(name for name in POSITION_AXES if name in names))
    mapped = jax.shard_map(
        sum_own_rows,
        in_specs=(PartitionSpec("tensor"), own_ids),
        out_specs=own_positions,
        axis_names=set(names),
        check_vma=False,
    )
    return mapped(table, ids)


def _scatter(rows: jax.Array) -> jax.Array:
    """The sum over "tensor" of `rows`, of which each device keeps some positions."""
    return jax.lax.psum_scatter(rows, "tensor", scatter_dimension=1, tiled=True)


def _scatter_on_cpu(rows: jax.Array) -> jax.Array:
    """`_scatter` in float32: XLA for a CPU ends the process where it would add up 16 bits."""
    return _scatter(rows.astype(jnp.float32)).astype(rows.dtype)
