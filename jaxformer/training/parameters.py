"""A tree of parameters by the paths of its leaves, and which leaves are matrices."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util

from jaxformer.nn.stacking import is_stacked

Params = Any
"""Nested dicts of arrays: what a Flax module's `init` returns under "params"."""


def path_name(path: tuple[Any, ...]) -> str:
    """The keys of a path of `jax.tree_util` as "path/of/leaf"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree (parameters, a state, a batch) as {"path/of/leaf": leaf}."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dicts for which `flatten` returns `leaves`."""
    return traverse_util.unflatten_dict(leaves, sep="/")


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """The tree of `function(path, leaf)` for each leaf of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: function(path_name(path), x), tree)


def layer_shape(path: str, leaf: Any) -> tuple[int, ...]:
    """The shape of the leaf at "path/of/leaf", without the layer axis of stacked blocks."""
    return leaf.shape[1:] if is_stacked(path) else leaf.shape


def matrix_mask(params: Params) -> Params:
    """True at each matrix or table of `params`, False at biases, scales and other vectors.

    Shapes decide, not names: a matrix has at least two dimensions and is not a bias. A bias has
    the trailing dimensions of a larger leaf of the same module, as a query's bias [N, H] has
    beside its kernel [D, N, H]. The layer axis of stacked blocks does not count.
    """
    shapes = defaultdict(list)
    for path, leaf in flatten(params).items():
        shapes[path.rpartition("/")[0]].append(layer_shape(path, leaf))

    def is_matrix(path: str, leaf: Any) -> bool:
        own = layer_shape(path, leaf)
        larger = (s for s in shapes[path.rpartition("/")[0]] if len(s) > len(own))
        return len(own) >= 2 and all(shape[-len(own) :] != own for shape in larger)

    return map_with_path(is_matrix, params)


def matrix_axes(path: str, leaf: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input axes and the output axes of a matrix.

    The first axis is the input, as in a query's kernel [D, N, H]. The output projection of
    attention, a module named `out` with a kernel [N, H, D], has one output axis, the last. The
    layer axis of stacked blocks is neither.
    """
    axes = tuple(range(1 if is_stacked(path) else 0, leaf.ndim))
    inputs = len(axes) - 1 if path.split("/")[-2:-1] == ["out"] else 1
    return axes[:inputs], axes[inputs:]


def matrix_shape(path: str, leaf: jax.Array) -> tuple[int, ...]:
    """The number of inputs and the number of outputs of a matrix."""
    return tuple(math.prod(leaf.shape[i] for i in group) for group in matrix_axes(path, leaf))
