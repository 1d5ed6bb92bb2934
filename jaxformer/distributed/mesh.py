"""The mesh of the devices of all processes, and programs for it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from jaxformer.errors import ConfigError

Device = Any
"""A `jax.Device`; JAX declares no type for it."""

AXES = ("data", "fsdp", "sequence", "tensor")
"""The axes of a mesh.

"data" divides the rows of a batch, "fsdp" divides rows and parameters, "sequence" divides the
positions of each row and parameters, in attention the heads (Jacobs et al. 2023), "tensor" divides
heads, the feed-forward size F and the vocabulary V.
"""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all four axes in "data=2,fsdp=2,tensor=2"; an absent axis has size 1.

    Raises `ConfigError` for an unknown or repeated axis and for a size that is not 1 or more.

    >>> parse_mesh("data=2,tensor=4")
    {'data': 2, 'fsdp': 1, 'sequence': 1, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise ConfigError(f"mesh axis {name!r} is unknown: give {', '.join(AXES)} as NAME=SIZE")
        if name in sizes:
            raise ConfigError(f"mesh axis {name!r} appears twice in {text!r}: give it once")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"mesh axis {part!r} has no size: give {name}=N with N at least 1")
        sizes[name] = int(number)
    return {name: sizes.get(name, 1) for name in AXES}


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
    slices: dict[int, list[Device]] = {}  # one where the devices are no TPUs
    for device in devices:
        index = getattr(device, "slice_index", 0) if hasattr(device, "coords") else 0
        slices.setdefault(index, []).append(device)
    if sizes["data"] % len(slices):
        raise ConfigError(
            f"the chips are in {len(slices)} slices, between which only the data axis may lie, but "
            f"data={sizes['data']}: give a multiple of {len(slices)}"
        )
    shape = (sizes["data"] // len(slices), *(sizes[axis] for axis in AXES[1:]))
    parts = [_arrange(shape, slices[index]) for index in sorted(slices)]
    return Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices of one slice, or of none, as an array of `shape`."""
    if max(shape) == len(devices) and hasattr(devices[0], "coords"):
        # JAX would lay a ring through a TPU's torus; lines of it can be joined in stages.
        lines = sorted(devices, key=lambda device: device.coords)
        return np.array(lines).reshape(shape)
    try:
        types = (AxisType.Auto,) * len(AXES)
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices).devices
    except NotImplementedError:  # two mesh axes have to share a TPU's physical axis
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)


def standardize(mesh: Mesh) -> Mesh:
    """`mesh` with all of `AXES` in order, and Auto axes.

    Under Explicit axes, the default of `jax.make_mesh`, a lookup in a sharded table is an error.
    Raises `ConfigError` for an axis with another name.
    """
    if not set(mesh.axis_names) <= set(AXES):
        raise ConfigError(
            f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, but only "
            f"{', '.join(AXES)} are supported: rename them"
        )
    order = sorted(range(mesh.devices.ndim), key=lambda i: AXES.index(mesh.axis_names[i]))
    shape = tuple(mesh.shape.get(name, 1) for name in AXES)
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


class CompiledStep:
    """A function compiled for the devices of a mesh, once for each combination of argument shapes.

    >>> from jaxformer.distributed import CompiledStep, make_mesh
    >>> double = CompiledStep(lambda x: 2 * x, jax.jit, make_mesh("data=1", jax.devices()[:1]))
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit: Callable[[Callable[..., Any]], Any],
        mesh: Mesh,
    ) -> None:
        """`jit` compiles for the devices of `mesh`."""
        self._mesh = mesh
        self._compiled = jit(function)

    def __call__(self, *args: Any) -> Any:
        """The result of the function, which may still be computed."""
        with jax.set_mesh(self._mesh):  # overrides a mesh that the caller has set
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._mesh):
            return self._compiled.lower(*args)
