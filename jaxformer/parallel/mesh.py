"""A mesh of devices from one line of text."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxformer.config import ConfigError

AXES = ("data", "fsdp", "tensor")
"""data: rows. fsdp: rows, and each parameter kept in parts. tensor: heads, F and V."""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all three axes in "data=2,fsdp=2,tensor=2"; an absent axis has size 1.

    Raises `ConfigError` for an unknown or repeated axis and for a size that is not 1 or more.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise ConfigError(f"mesh axis {name!r} is unknown: give {', '.join(AXES)} as NAME=SIZE")
        if name in sizes:
            raise ConfigError(f"mesh axis {name!r} stands twice in {text!r}: give it once")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"mesh axis {part!r} has no size: give {name}=N with N at least 1")
        sizes[name] = int(number)
    return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh that `text` describes, of all devices of all processes or of `devices`.

    Neighbours along tensor, which speak most, are the closest. Raises `ConfigError` as
    `parse_mesh` does, and when the sizes do not multiply to the number of devices.
    """
    sizes = parse_mesh(text)
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(sizes.values()) != len(devices):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {product} has {math.prod(sizes.values())} places, but there are "
            f"{len(devices)} devices: make the sizes multiply to {len(devices)}"
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=devices)


def standard(mesh: Mesh) -> Mesh:
    """`mesh` with all of `AXES` in order, and Auto axes.

    Under Explicit axes, the default of `jax.make_mesh`, a lookup in a sharded table is an error.
    Raises `ConfigError` for an axis of another name.
    """
    if not set(mesh.axis_names) <= set(AXES):
        raise ConfigError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, but placement knows "
            f"{', '.join(AXES)}: name them so"
        )
    order = sorted(range(mesh.devices.ndim), key=lambda i: AXES.index(mesh.axis_names[i]))
    shape = tuple(mesh.shape.get(name, 1) for name in AXES)
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
