"""Sums over the fsdp axis in stages, each along one axis of a TPU's torus.

A TPU's compiler replaces a reduce-scatter by a sum of everything on all devices where the devices
lie along several axes of the torus: `tests/compilers` shows it for topologies of 4 to 256 chips.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

Stages = tuple[tuple[tuple[int, ...], ...], ...]
"""For each stage of a sum over fsdp: the groups of indices along fsdp that are added up."""


def torus_stages(mesh: Mesh) -> Stages:
    """The stages of a reduce-scatter over the fsdp axis of `mesh` on a TPU's torus.

    The first stage joins the most distant indices, the last one neighbours, so that index i ends
    with part i. () where the fsdp devices lie on one line, or are not those of a torus.
    """
    rows = np.moveaxis(mesh.devices, 1, -1).reshape(-1, mesh.shape["fsdp"])
    stages = {line_stages([tuple(getattr(x, "coords", ())) for x in row]) for row in rows}
    return stages.pop() if len(stages) == 1 else ()


def line_stages(coords: list[tuple[int, ...]]) -> Stages:
    """The stages of `torus_stages` for devices at `coords` of a torus, in the order of fsdp."""
    for axis in range(len(coords[0])):
        size = len({at[axis] for at in coords})
        if not 1 < size < len(coords) or len(coords) % size:
            continue
        others = [at[:axis] + at[axis + 1 :] for at in coords]
        lines = [range(first, first + size) for first in range(0, len(coords), size)]
        columns = [{coords[i][axis]: i for i in line} for line in lines]
        if any(len({others[i] for i in line}) > 1 for line in lines) or any(
            column.keys() != columns[0].keys() for column in columns
        ):
            continue
        outer = line_stages([others[line[0]] for line in lines])
        across = tuple(
            tuple(tuple(columns[i][at] for i in group) for group in groups for at in columns[0])
            for groups in outer or ((tuple(range(len(lines))),),)
        )
        return (*across, tuple(map(tuple, lines)))
    return ()


def sum_and_divide(
    gradient: jax.Array, dimension: int, axes: tuple[str, ...], stages: Stages
) -> jax.Array:
    """The sum of `gradient` over `axes`, of which each device keeps a part along `dimension`.

    A TPU's compiler sums all of an array on all devices where a part is no whole number of tiles,
    or where the devices lie along several axes of its torus. So the parts come first, before two
    dimensions for the rest, and each of `stages` sums along one axis of the torus.
    """
    before, (size, *after) = gradient.shape[:dimension], gradient.shape[dimension:]
    counts = [len(groups[0]) for groups in stages] or [jax.lax.axis_size(axes)]
    part = size // math.prod(counts)
    parts = gradient.reshape(*before, *counts, part, *after)
    parts = jnp.moveaxis(parts, range(dimension, dimension + len(counts)), range(len(counts)))
    parts = parts.reshape(*counts, -1, parts.shape[-1])
    for groups in stages or (None,):
        parts = jax.lax.psum_scatter(parts, axes, axis_index_groups=groups)
    return parts.reshape(*before, part, *after)
