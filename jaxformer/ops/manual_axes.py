"""The axes along which arrays vary inside `jax.shard_map` with `check_vma=True`.

JAX then keeps them in the type of each array. It derives them for its own operations, but not for
the results of a Pallas kernel, and not through an inner `jax.shard_map` with `check_vma=False`.
Without `check_vma`, and outside of `jax.shard_map`, nothing varies by its type.
"""

from typing import Any, TypeVar

import jax

from jaxformer.errors import ConfigError

Tree = TypeVar("Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes along which an array of `tree` varies.

    >>> varying_axes(jax.numpy.ones(3))
    frozenset()
    """
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def vary_as(tree: Tree, other: Any) -> Tree:
    """`tree`, whose arrays vary by their types also along the axes along which `other` varies.

    >>> vary_as((1.0, None), jax.numpy.ones(3))
    (1.0, None)
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return tree
    axes = varying_axes(other)

    def vary(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def vary_alike(tree: Tree) -> Tree:
    """`tree` with all its arrays varying along the same axes by their types.

    >>> vary_alike((1.0, None))
    (1.0, None)
    """
    return vary_as(tree, tree)


def check_differentiable(tree: Any) -> None:
    """Raises `ConfigError` where an array of `tree` varies by its type.

    For what is mapped over further axes: JAX does not differentiate an inner `jax.shard_map` there.
    """
    axes = sorted(varying_axes(tree))
    if axes:
        raise ConfigError(
            f"a jax.shard_map over {', '.join(axes)} with check_vma=True leaves other axes of the "
            "mesh to XLA, along which this model maps again: JAX does not differentiate that, so "
            "give check_vma=False, or map over all axes of the mesh (without axis_names)"
        )


def shape_like(x: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of a kernel's result that varies along the axes of its argument `x`.

    >>> shape_like(jax.numpy.ones(3), (2, 3), "int32").shape
    (2, 3)
    """
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
