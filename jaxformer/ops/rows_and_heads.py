"""Kernels on arrays of rows and heads, on the devices of a mesh that divides both."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jaxformer.ops.manual_axes import vary_alike, varying_axes
from jaxformer.ops.partitioning import axes_of_heads, axis_that_divides


def map_rows_and_heads(compute: Callable[..., Any], arrays: Sequence[Array]) -> Any:
    """`compute(*arrays)`, each device with its rows along "data" and the heads of its cache.

    The arrays are [B, K, ...], [B, 1, ...] or [B], the results [B, K, ...]. XLA does not divide the
    call of a kernel, so `jax.shard_map` does. Rows or heads that the axis does not divide are whole
    on each device.

    >>> map_rows_and_heads(lambda x, y: x + y[:, None], (jnp.ones((2, 3)), jnp.arange(2)))
    Array([[1., 1., 1.],
           [2., 2., 2.]], dtype=float32)
    """

    def compute_alike(*arrays: Array) -> Any:
        return compute(*vary_alike(arrays))

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.auto_axes or mesh.size == 1:
        return compute_alike(*arrays)
    rows, heads = next(x.shape[:2] for x in arrays if x.ndim > 1)
    of_rows = PartitionSpec(axis_that_divides("data", rows))
    of_heads = PartitionSpec(*of_rows, axes_of_heads(heads))
    return jax.shard_map(
        compute_alike,
        in_specs=tuple(of_heads if x.ndim > 1 and x.shape[1] == heads else of_rows for x in arrays),
        out_specs=of_heads,
        axis_names={*mesh.auto_axes},
        check_vma=bool(varying_axes(tuple(arrays))),
    )(*arrays)
