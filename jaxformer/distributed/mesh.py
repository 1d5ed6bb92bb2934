"""The mesh of the devices of all processes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from jaxformer.errors import ConfigError

Device = Any
"""A `jax.Device`; JAX declares no type for it."""

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
"""The axes of a mesh.

"data" divides the rows of a batch, "fsdp" divides rows and parameters, "sequence" divides the
positions of each row and parameters, in attention the heads (Jacobs et al. 2023), "tensor" divides
heads, the feed-forward size F and the vocabulary V.
"""


BATCH_AXES = ("data", "fsdp")
"""The mesh axes that divide the rows of a batch."""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all four axes in "data=2,fsdp=2,tensor=2"; an absent axis has size 1.

    Raises `ConfigError` for an unknown or repeated axis and for a size that is not 1 or more.

    >>> parse_mesh("data=2,tensor=4")
    {'data': 2, 'fsdp': 1, 'sequence': 1, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES:
            raise ConfigError(
                f"mesh axis {name!r} is unknown: give {', '.join(MESH_AXES)} as NAME=SIZE"
            )
        if name in sizes:
            raise ConfigError(f"mesh axis {name!r} appears twice in {text!r}: give it once")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"mesh axis {part!r} has no size: give {name}=N with N at least 1")
        sizes[name] = int(number)
    return {name: sizes.get(name, 1) for name in MESH_AXES}


def make_mesh(text: str, devices: Sequence[Device] | None = None) -> Mesh:
    """The mesh that `text` describes, of `devices` or of all devices of all processes.

    Neighbours along the tensor axis, which communicate most, are the closest devices. Of several
    slices of TPUs, whose network is slow, the data axis is divided first. Raises `ConfigError` as
    `parse_mesh` does, when the product of the sizes is not the number of devices, and when the
    number of slices does not divide the data axis.

    >>> dict(make_mesh("data=1", jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'sequence': 1, 'tensor': 1}
    """
    sizes = parse_mesh(text)
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(sizes.values()) != len(devices):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {product} needs {math.prod(sizes.values())} devices, but there are "
            f"{len(devices)}: give sizes whose product is {len(devices)}"
        )
    slices: dict[int, list[Device]] = {}
    for device in devices:
        slices.setdefault(_slice_index(device), []).append(device)
    if sizes["data"] % len(slices):
        raise ConfigError(
            f"the chips are in {len(slices)} slices, between which only the data axis may lie, but "
            f"data={sizes['data']}: give a multiple of {len(slices)}"
        )
    shape = (sizes["data"] // len(slices), *(sizes[axis] for axis in MESH_AXES[1:]))
    parts = [_arrange(shape, slices[index]) for index in sorted(slices)]
    return Mesh(np.concatenate(parts), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def count_slices(mesh: Mesh) -> int:
    """The number of slices of TPUs that the data axis of `mesh` lies across.

    1 for other devices, and for a mesh whose data axis is not one slice after the other.
    """
    indices = np.array([_slice_index(device) for device in mesh.devices.flat])
    count = len(np.unique(indices))
    if mesh.shape["data"] % count:
        return 1
    parts = indices.reshape(count, -1)
    return count if (parts == parts[:, :1]).all() else 1


def _slice_index(device: Device) -> int:
    """The slice of TPUs that `device` is in; 0 for other devices."""
    return getattr(device, "slice_index", 0) if hasattr(device, "coords") else 0


def _arrange(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices of one slice, or of none, as an array of `shape`."""
    if max(shape) == len(devices) and hasattr(devices[0], "coords"):
        # JAX would lay a ring through a TPU's torus; lines of it can be joined in stages.
        lines = sorted(devices, key=lambda device: device.coords)
        return np.array(lines).reshape(shape)
    try:
        types = (AxisType.Auto,) * len(MESH_AXES)
        return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices).devices
    except NotImplementedError:  # two mesh axes have to share a TPU's physical axis
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)


def standardize(mesh: Mesh) -> Mesh:
    """`mesh` with all of `MESH_AXES` in order, and Auto axes.

    Under Explicit axes, the default of `jax.make_mesh`, a lookup in a sharded table is an error.
    Raises `ConfigError` for an axis with another name.
    """
    if not set(mesh.axis_names) <= set(MESH_AXES):
        raise ConfigError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, but only "
            f"{', '.join(MESH_AXES)} are supported: rename them"
        )
    order = sorted(range(mesh.devices.ndim), key=lambda i: MESH_AXES.index(mesh.axis_names[i]))
    shape = tuple(mesh.shape.get(name, 1) for name in MESH_AXES)
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
