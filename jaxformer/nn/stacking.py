"""Parameters of blocks in one tree each, or stacked along a leading layer axis (`scan_layers`)."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STACKED = "stacked_blocks"
"""The name of the subtree whose leaves have a leading layer axis."""


def is_stacked(path: str) -> bool:
    """Whether the leaf at "path/of/leaf" has a leading layer axis."""
    return STACKED in path.split("/")


def stack_blocks(params: Any) -> Any:
    """`params` of a model without `scan_layers` in the layout of the same model with it.

    The subtrees blocks_0, blocks_1, ... of each stack become one, `stacked_blocks`.

    >>> blocks = {"blocks_0": {"scale": jnp.zeros(3)}, "blocks_1": {"scale": jnp.ones(3)}}
    >>> jf.stack_blocks({"decoder": blocks})["decoder"]["stacked_blocks"]["scale"]
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    if not isinstance(params, Mapping):
        return params
    names = [name for name in params if re.fullmatch(r"blocks_\d+", name)]
    rest = {name: stack_blocks(tree) for name, tree in params.items() if name not in names}
    if not names:
        return rest
    blocks = (params[f"blocks_{i}"] for i in range(len(names)))
    return rest | {STACKED: jax.tree.map(lambda *leaves: _numpy(leaves[0]).stack(leaves), *blocks)}


def unstack_blocks(params: Any) -> Any:
    """The inverse of `stack_blocks`, also for the intermediates that such a model returns.

    >>> blocks = jf.unstack_blocks({"stacked_blocks": {"scale": jnp.array([[1.0], [2.0]])}})
    >>> blocks["blocks_1"]["scale"]
    Array([2.], dtype=float32)
    """
    if not isinstance(params, Mapping):
        return params
    found = {name: unstack_blocks(tree) for name, tree in params.items() if name != STACKED}
    if STACKED in params:
        count = len(jax.tree.leaves(params[STACKED])[0])
        for i in range(count):
            found[f"blocks_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], params[STACKED])
    return found


def _numpy(leaf: Any) -> Any:
    """The module that stacks arrays such as `leaf`: parameters that were loaded stay in numpy."""
    return np if isinstance(leaf, np.ndarray) else jnp
