"""How the devices of a mesh share the state of a search, and the texts that enter it."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.distributed import Strategy
from jaxformer.nn.cache import LayerCache
from jaxformer.ops.partitioning import axes_of_heads, axis_that_divides


def state_specs(state: Any, rows: int) -> Any:
    """The `PartitionSpec` of each array of a search's `state`, on the mesh that is set.

    "data" divides the rows, and "tensor" and "sequence" the heads of keys and values, where they
    divide their number.
    """
    sentences = axis_that_divides("data", rows)

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, LayerCache):
            return leaf.specs(sentences, axes_of_heads(leaf.groups[1]))
        has_rows = leaf.ndim > 0 and leaf.shape[0] == rows
        return PartitionSpec(sentences) if has_rows and sentences else PartitionSpec()

    return jax.tree.map(spec, state, is_leaf=lambda leaf: isinstance(leaf, LayerCache))


def shardings(devices: Strategy, state: Any, rows: int) -> Any:
    """The sharding of each array of a search's `state` on `devices`."""
    with devices.active():
        specs = state_specs(state, rows)
    return jax.tree.map(lambda spec: NamedSharding(devices.mesh, spec), specs)


def divide_rows(arrays: Any, rows: int) -> Any:
    """`arrays` of this many `rows` within a compiled piece, divided as a search's state is.

    Without it each device computes all texts that enter.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    return jax.lax.with_sharding_constraint(arrays, state_specs(arrays, rows))


def placed(state: Any) -> Any:
    """`state` within a compiled piece, divided as it was when the search began.

    Without it XLA chooses, and the next piece is compiled once more for what it chose.
    """
    return divide_rows(state, len(state.stopped))
