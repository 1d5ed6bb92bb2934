"""Sums over fsdp in stages, each along one axis of a TPU's torus.

A TPU's compiler replaces a reduce-scatter by a sum of everything on all devices where the devices
lie along several axes of the torus (`tests/compilers` shows it for 4 to 256 chips). Eight devices
in this order on a plane are therefore summed along the columns first, then along the rows:

    0 1 2 3      stage 1: (0, 7) (1, 6) (2, 5) (3, 4)
    7 6 5 4      stage 2: (0, 1, 2, 3) (4, 5, 6, 7)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

Coordinates = tuple[int, ...]
"""The place of a device on each axis of the torus; () for a device that lies on none."""

Group = tuple[int, ...]
"""Indices along fsdp that are added up together."""

Stage = tuple[Group, ...]
"""Groups of equal size; each index is in one of them."""

Stages = tuple[Stage, ...]
"""The stages of a sum over fsdp, in their order; () is one sum over all."""


def torus_stages(mesh: Mesh) -> Stages:
    """The stages of a reduce-scatter over the fsdp axis of `mesh` on a TPU's torus.

    The first stage joins the most distant indices, the last one neighbours, so that index i ends
    with part i. () where the fsdp devices lie on one line, or form no torus.
    """
    fsdp_groups = np.moveaxis(mesh.devices, 1, -1).reshape(-1, mesh.shape["fsdp"])
    stages = set()
    for devices in fsdp_groups:
        coords = [tuple(getattr(device, "coords", ())) for device in devices]
        stages.add(line_stages(coords))
    return stages.pop() if len(stages) == 1 else ()


def line_stages(coords: list[Coordinates]) -> Stages:
    """The stages of `torus_stages` for devices at `coords` of a torus, in the order of fsdp."""
    for axis in range(len(coords[0])):
        lines = _lines_along(axis, coords)
        if lines:
            return (*_stages_across(lines, axis, coords), lines)
    return ()


def _lines_along(axis: int, coords: list[Coordinates]) -> Stage:
    """The lines along `axis`, each of successive indices; () unless several equal lines are all."""
    length = len({place[axis] for place in coords})
    if not 1 < length < len(coords) or len(coords) % length:
        return ()
    lines = tuple(tuple(range(first, first + length)) for first in range(0, len(coords), length))
    for line in lines:
        places_on_axis = {coords[index][axis] for index in line}
        places_of_line = {_other_coordinates(coords[index], axis) for index in line}
        if len(places_on_axis) < length or len(places_of_line) > 1:
            return ()
    return lines


def _stages_across(lines: Stage, axis: int, coords: list[Coordinates]) -> Stages:
    """The stages that add up `lines`, each with the devices at equal places along `axis`."""
    places_of_lines = [_other_coordinates(coords[line[0]], axis) for line in lines]
    all_lines_at_once: Stages = ((tuple(range(len(lines))),),)
    stages_of_lines = line_stages(places_of_lines) or all_lines_at_once
    device_at = {(n, coords[i][axis]): i for n, line in enumerate(lines) for i in line}
    places_on_axis = [coords[index][axis] for index in lines[0]]
    return tuple(
        tuple(
            tuple(device_at[line, place] for line in group)
            for group in stage
            for place in places_on_axis
        )
        for stage in stages_of_lines
    )


def _other_coordinates(place: Coordinates, axis: int) -> Coordinates:
    return place[:axis] + place[axis + 1 :]


def sum_and_divide(
    gradient: jax.Array, dimension: int, axes: tuple[str, ...], stages: Stages
) -> jax.Array:
    """The sum of `gradient` over `axes`, of which each device keeps a part along `dimension`.

    A TPU's compiler also sums all of an array on all devices where a part is no whole number of
    tiles. So the parts come first, before two dimensions for the rest.
    """
    before, (size, *after) = gradient.shape[:dimension], gradient.shape[dimension:]
    counts = [len(stage[0]) for stage in stages] or [jax.lax.axis_size(axes)]
    part = size // math.prod(counts)
    parts = gradient.reshape(*before, *counts, part, *after)
    parts = jnp.moveaxis(parts, range(dimension, dimension + len(counts)), range(len(counts)))
    parts = parts.reshape(*counts, -1, parts.shape[-1])
    for stage in stages or (None,):
        parts = jax.lax.psum_scatter(parts, axes, axis_index_groups=stage)
    return parts.reshape(*before, part, *after)
