"""Positions and heads, divided over the mesh axes "sequence" and "tensor" of a program.

XLA partitions the program along these axes. Between the sub-layers of a block each device has its
own positions, so that norms, dropout and residual sums are computed once (Korthikanti et al. 2022,
section 4.2.2). A sub-layer gets the positions of its part of "sequence", and computes its own heads
or features of them. In attention a device has all positions of some heads (Jacobs et al. 2023).
A size that the axes do not divide, such as the one position of a decoding step, stays whole.
"""

import math
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxformer.errors import ConfigError
from jaxformer.ops.manual_axes import varying_axes

POSITION_AXES = ("sequence", "tensor")
HEAD_AXES = ("tensor", "sequence")

_POSITIONS = (POSITION_AXES,)
_PART = ("sequence",)
_HEADS = (None, HEAD_AXES)
_PART_HEADS = ("sequence", "tensor")


def partitioned(axes: tuple[str, ...] = POSITION_AXES) -> dict[str, int]:
    """{name: size} of each of `axes` along which XLA partitions the program that is traced.

    >>> partitioned()  # without a mesh
    {}
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in axes if axis in mesh.auto_axes}


def device_axes(x: Any) -> tuple[Any, ...]:
    """The axes of a `jax.shard_map` or `jax.pmap` along which devices may have other values of `x`.

    With `check_vma=False`, and in `jax.pmap`, JAX does not know them: they are all axes.

    >>> device_axes(jnp.ones(3))  # outside of one
    ()
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and varying_axes(jax.lax.axis_index(axes)):  # check_vma=True
        return tuple(axis for axis in axes if axis in varying_axes(x))
    return axes


def axis_that_divides(name: str, size: int) -> str | None:
    """The mesh axis `name`, where XLA partitions along it in several parts of `size`; else None.

    >>> axis_that_divides("data", 6) is None  # without a mesh
    True
    """
    parts = partitioned((name,)).get(name, 1)
    return name if parts > 1 and size % parts == 0 else None


def axes_of_heads(heads: int) -> str | tuple[str, ...] | None:
    """The mesh axes that divide `heads` of a cache: "tensor", and "sequence" where both can.

    >>> axes_of_heads(6) is None  # without a mesh
    True
    """
    names: list[str] = []
    for name, parts in partitioned(HEAD_AXES).items():
        if heads % parts:
            break
        if parts > 1:
            names.append(name)
            heads //= parts
    if len(names) == 1:
        return names[0]
    return tuple(names) or None


def whole_rows(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Logits `x` with all columns of a row on one device; "data" divides the rows where it can.

    For what goes along a row, such as a sum up to each column: of divided columns XLA for a GPU
    computes it in a loop with a pass for each.

    >>> whole_rows(jnp.ones((2, 3))).shape
    (2, 3)
    """
    if math.prod(partitioned(jax.sharding.get_abstract_mesh().axis_names).values()) == 1:
        return x
    spec = PartitionSpec(axis_that_divides("data", len(x)), None)
    return jax.lax.with_sharding_constraint(x, spec)


def sum_over_devices(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The sum of `x` over the devices that a program is mapped over (`jax.shard_map`, `jax.pmap`).

    In a loss these have different rows of a batch: the step of a strategy is mapped over "data" and
    "fsdp". Elsewhere it is `x`.

    >>> float(sum_over_devices(jnp.float32(3.0)))  # without a mesh
    3.0
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.psum(x, axes) if axes else x


def divide_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The output `x` of a sub-layer, each device with its own positions.

    >>> divide_positions(jnp.ones((2, 3, 4))).shape
    (2, 3, 4)
    """
    return _place(x, _POSITIONS, _PART) if _divides(x.shape[1]) else x


def gather_positions(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The input `x` of a sub-layer, each device with the positions of those along "tensor".

    >>> gather_positions(jnp.ones((2, 3, 4))).shape
    (2, 3, 4)
    """
    return _place(x, _PART, _POSITIONS) if _divides(x.shape[1]) else x


def divide_heads(
    q: Float[Array, "R T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> tuple[Float[Array, "R T N H"], Float[Array, "B S M H"], Float[Array, "B S M Hv"]]:
    """Queries, keys and values of attention, each device with all positions of its own heads.

    Heads of keys are repeated until the devices divide them. Raises `ConfigError` where they do not
    divide the heads of queries.

    >>> q, k, _ = divide_heads(jnp.ones((2, 3, 4, 5)), *[jnp.ones((2, 3, 1, 5))] * 2)
    >>> q.shape, k.shape
    ((2, 3, 4, 5), (2, 3, 1, 5))
    """
    parts, heads = math.prod(partitioned().values()), q.shape[2]
    if parts == 1 or q.shape[1] < parts:
        return q, k, v
    if heads % parts:
        sizes = " x ".join(f"{axis}={size}" for axis, size in partitioned(HEAD_AXES).items())
        raise ConfigError(
            f"{heads} heads are not divisible by {sizes}: give a mesh whose axes tensor and "
            "sequence divide them"
        )
    # Without constraints before XLA gathers what it repeats, and adds its gradient up twice.
    q, k, v = _place_each((q, k, v), _PART_HEADS)
    k, v = (jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], 2) for x in (k, v))
    k, v = _place_each((k, v), _PART_HEADS)
    return _place_each((q, k, v), _HEADS)


def gather_heads(heads: Float[Array, "R T N Hv"]) -> Float[Array, "R T N Hv"]:
    """The result of attention: `divide_heads` undone, but for the heads along "tensor".

    >>> gather_heads(jnp.ones((2, 3, 4, 5))).shape
    (2, 3, 4, 5)
    """
    parts = math.prod(partitioned().values())
    if parts == 1 or heads.shape[1] < parts:
        return heads
    heads = _place(heads, _PART_HEADS, _HEADS)
    # Without it XLA gathers all positions of the gradient, and computes a device's own heads of it.
    return _place(heads, _PART_HEADS, _PART_HEADS)


def _place_each(arrays: tuple[Array, ...], axes: tuple[Any, ...]) -> Any:
    return tuple(_place(x, axes, _PART_HEADS) for x in arrays)


def _divides(length: int) -> bool:
    """Whether there are several parts, and they divide `length`.

    Warns of a long sequence that stays whole in spite of an axis "sequence".
    """
    axes = partitioned()
    parts = math.prod(axes.values())
    if length % parts == 0:
        return parts > 1
    if length > parts and axes.get("sequence", 1) > 1:
        warnings.warn(
            f"{length} positions are not divided along sequence={axes['sequence']}, so each "
            f"device computes all: give a length that {parts} divides",
            stacklevel=3,
        )
    return False


# The gradient of a constraint has the same constraint. But where the forward pass divides a sum
# among devices, the backward pass gathers it, and the other way round.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _place(x: Array, axes: tuple[Any, ...], of_gradient: tuple[Any, ...]) -> Array:
    """`x` with its dimensions from 1 on divided by `axes`, and the gradient by `of_gradient`."""
    return _constrain(x, axes)


def _constrain(x: Array, axes: tuple[Any, ...]) -> Array:
    anything = PartitionSpec.UNCONSTRAINED
    entries = []
    for size, names in zip(x.shape[1:], axes, strict=False):
        names = partitioned(names if isinstance(names, tuple) else (names,))
        entries.append(None if size % math.prod(names.values()) else tuple(names))
    free = [anything] * (x.ndim - 1 - len(axes))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(anything, *entries, *free))


def _place_forward(x, axes, of_gradient):
    return _constrain(x, axes), None


def _place_backward(axes, of_gradient, _, gradient):
    return (_constrain(gradient, of_gradient),)


_place.defvjp(_place_forward, _place_backward)
