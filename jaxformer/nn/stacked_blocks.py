"""The parameters of blocks, apart or stacked for one loop over them."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STACKED = "stacked_blocks"
"""The name of the subtree of parameters whose leaves have a leading layer axis."""


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
    outside = {name: stack_blocks(tree) for name, tree in params.items() if name not in names}
    if not names:
        return outside
    blocks = (params[f"blocks_{i}"] for i in range(len(names)))

    def stack(*leaves: Any) -> Any:  # parameters that were loaded stay in numpy
        return (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves)

    return outside | {STACKED: jax.tree.map(stack, *blocks)}


def unstack_blocks(params: Any) -> Any:
    """The inverse of `stack_blocks`, also for the intermediates that such a model returns.

    >>> blocks = jf.unstack_blocks({"stacked_blocks": {"scale": jnp.array([[1.0], [2.0]])}})
    >>> blocks["blocks_1"]["scale"]
    Array([2.], dtype=float32)
    """
    if not isinstance(params, Mapping):
        return params
    unstacked = {name: unstack_blocks(tree) for name, tree in params.items() if name != STACKED}
    if STACKED in params:
        count = len(jax.tree.leaves(params[STACKED])[0])
        for i in range(count):
            unstacked[f"blocks_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], params[STACKED])
    return unstacked
