"""Collectives along an axis of a mesh, compared with `jax.vmap` on one device, and timed."""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks.timing import Case, CaseFailed

_WIDTH = 7  # numbers of a row of the compared blocks


def _shift(x: Any, axis: str) -> Any:
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


COLLECTIVES: dict[str, Callable[[Any, str], Any]] = {
    "psum": jax.lax.psum,
    "all_gather": lambda x, axis: jax.lax.all_gather(x[0], axis),
    "reduce_scatter": jax.lax.psum_scatter,
    "all_to_all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0),
    "ppermute": _shift,
}
"""What each of n devices along an axis does with its block [n, W]."""


def collective(name: str, axis: str, mesh: Mesh, size: float) -> Case:
    """The collective along `axis`, on blocks of `size` bytes a device.

    "sent_bytes" are those that a device sends around a ring. Raises `CaseFailed` where a small call
    has another result than on one device.
    """
    count, everyone = mesh.shape[axis], PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, everyone)

    def compute(block: jax.Array) -> jax.Array:
        return COLLECTIVES[name](block, axis)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
    def program(blocks: jax.Array) -> jax.Array:
        return compute(blocks[0])[None]

    shape = mesh.size, count, _WIDTH
    numbers = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) % 251  # exact sums
    result = program(jax.make_array_from_callback(shape, sharding, lambda part: numbers[part]))
    mapped = reduce(lambda f, name: jax.vmap(f, axis_name=name), mesh.axis_names[::-1], compute)
    expected = np.asarray(mapped(jnp.array(numbers.reshape(*mesh.devices.shape, count, _WIDTH))))
    expected = expected.reshape(mesh.size, *expected.shape[mesh.devices.ndim :])
    for shard in result.addressable_shards:
        if not np.array_equal(shard.data, expected[shard.index]):
            raise CaseFailed(f"device {shard.device.id} has another result than one device alone")
    width = max(int(size) // 4 // count, 1)
    blocks = jax.jit(lambda: jnp.ones((mesh.size, count, width)), out_shardings=sharding)()
    share = {"psum": 2 * (1 - 1 / count), "ppermute": 1.0}.get(name, 1 - 1 / count)
    facts = {"sent_bytes": 4 * count * width * share}
    return Case(lambda: program(blocks), facts, jax.block_until_ready)
