"""Collectives along an axis of a mesh: compared with one device, then cases to time."""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks.timing import Case, CaseFailed

_BLOCK_WIDTH = 7
"""Numbers in a row of the blocks on which a collective is compared."""


def _shift(x: Any, axis: str) -> Any:
    """Each device's `x` at the next device along `axis`."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


COLLECTIVES: dict[str, Callable[[Any, str], Any]] = {
    "psum": jax.lax.psum,
    "all_gather": lambda x, axis: jax.lax.all_gather(x[0], axis),
    "reduce_scatter": jax.lax.psum_scatter,
    "all_to_all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0),
    "ppermute": _shift,
}
"""name -> the function that each of n devices along an axis computes of its block [n, W]."""


def collective(name: str, axis: str, mesh: Mesh, size: float) -> Case:
    """The collective `name` along `axis`, on blocks of `size` bytes a device.

    "sent_bytes" count what a device sends around a ring. Raises `CaseFailed` where a small call
    has another result than on one device.
    """
    all_axes = PartitionSpec(mesh.axis_names)

    def compute(block: jax.Array) -> jax.Array:
        return COLLECTIVES[name](block, axis)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=all_axes, out_specs=all_axes, check_vma=False)
    def program(blocks: jax.Array) -> jax.Array:
        return compute(blocks[0])[None]

    count = mesh.shape[axis]
    _compare_with_one_device(program, compute, mesh, count)
    width = max(int(size) // 4 // count, 1)  # of float32
    sharding = NamedSharding(mesh, all_axes)
    blocks = jax.jit(lambda: jnp.ones((mesh.size, count, width)), out_shardings=sharding)()
    facts = {"sent_bytes": 4 * count * width * _sent_share(name, count)}
    return Case(lambda: program(blocks), facts, jax.block_until_ready)


def _compare_with_one_device(
    program: Callable[[jax.Array], jax.Array],
    compute: Callable[[jax.Array], jax.Array],
    mesh: Mesh,
    count: int,
) -> None:
    """Raises `CaseFailed` where `program` on `mesh` differs from `compute` on one device.

    A block has `count` rows, one for each device along the axis.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = mesh.size, count, _BLOCK_WIDTH
    numbers = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) % 251  # exact sums
    result = program(jax.make_array_from_callback(shape, sharding, lambda part: numbers[part]))
    # On one device the axes of the mesh are axes of an array, each mapped by `jax.vmap`.
    mapped = reduce(lambda f, name: jax.vmap(f, axis_name=name), mesh.axis_names[::-1], compute)
    divided = numbers.reshape(*mesh.devices.shape, *shape[1:])
    expected = np.asarray(mapped(jnp.array(divided)))
    expected = expected.reshape(mesh.size, *expected.shape[mesh.devices.ndim :])
    for shard in result.addressable_shards:
        if not np.array_equal(shard.data, expected[shard.index]):
            raise CaseFailed(f"device {shard.device.id} has another result than one device alone")


def _sent_share(name: str, count: int) -> float:
    """The part of its block that each of `count` devices sends around a ring."""
    if name == "ppermute":
        return 1.0
    to_all_others = 1 - 1 / count
    if name == "psum":  # a reduction, and a gathering of the sums
        return 2 * to_all_others
    return to_all_others
