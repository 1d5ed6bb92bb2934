"""The mesh of the devices of all processes, their memory, and arrays and programs for it."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, PartitionSpec, Sharding

from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten

Device = Any
"""A `jax.Device`; JAX declares no type for it."""

MESH_AXES = ("data", "fsdp", "sequence", "tensor")
"""The axes of a mesh.

"data" divides the rows of a batch, "fsdp" divides rows and parameters, "sequence" divides the
positions of each row and parameters, in attention the heads (Jacobs et al. 2023), "tensor" divides
heads, the feed-forward size F and the vocabulary V.
"""


# The limits of the control group that this process is in, of either version of Linux's.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")

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


def row_spec(leaf: Any, axes: tuple[str, ...] = BATCH_AXES) -> PartitionSpec:
    """The spec of a leaf of a batch: mesh `axes` divide its rows; a scalar is not divided."""
    return PartitionSpec(axes) if jnp.ndim(leaf) else PartitionSpec()


def check_rows(batch: Any, num_shards: int, grad_accumulation: int = 1, share: float = 1.0) -> None:
    """Raises `ConfigError` for rows that shards times parts of the batch do not divide.

    A leaf has 1 / `share` of the rows of the global batch.
    """
    need = num_shards * grad_accumulation
    for path, leaf in flatten(batch).items():
        rows = round(leaf.shape[0] * share) if jnp.ndim(leaf) else 0
        if rows % need:
            raise ConfigError(
                f"{path} has {rows} rows, but {num_shards} shards x grad_accumulation="
                f"{grad_accumulation} need a multiple of {need}: change one of the three"
            )


def global_array(leaf: Any, sharding: Sharding, share: float = 1.0) -> jax.Array:
    """The array of all processes; this one has built 1 / `share` of its rows, in their order."""
    leaf = np.asarray(leaf)
    leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    shape = (round(len(leaf) * share), *leaf.shape[1:]) if leaf.ndim else ()
    return jax.make_array_from_process_local_data(sharding, leaf, shape)


class CompiledStep:
    """A function compiled for the devices of a mesh, once for each combination of argument shapes.

    `options` go to `jax.jit`.

    >>> from jaxformer.distributed import CompiledStep, make_mesh
    >>> double = CompiledStep(lambda x: 2 * x, make_mesh("data=1", jax.devices()[:1]))
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """

    loss: Any = None
    """The loss that a training step minimises; None of other functions."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        compiler_options: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._mesh = mesh
        options["compiler_options"] = dict(compiler_options) or None
        self._compiled = jax.jit(function, **options)

    def __call__(self, *args: Any) -> Any:
        """The result of the function, which may still be computed."""
        with jax.set_mesh(self._mesh):  # overrides a mesh that the caller has set
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._mesh):
            return self._compiled.lower(*args)


@contextmanager
def threefry_kernel(use: bool) -> Iterator[None]:
    """Within it, if `use`, programs for a GPU call JAX's kernel for random numbers.

    A program that creates many parameters then compiles in a tenth of the time: otherwise each has
    a kernel of its own.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, use or before)
    try:
        yield
    finally:
        jax.config.update(option, before)


def check_fits(state: Any) -> None:
    """Raises `ConfigError` if a device of this process has less memory than its part of `state`.

    `state` is a tree of `jax.ShapeDtypeStruct` with shardings. Without this check XLA takes minutes
    to fail, and on a CPU hangs.
    """
    leaves = jax.tree.leaves(state)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    devices = {d for x in leaves for d in x.sharding.device_set}
    local_devices = [d for d in devices if d.process_index == jax.process_index()]
    limits = [
        limit for device in local_devices if (limit := device_memory(device, len(local_devices)))
    ]
    if limits and size > min(limits):
        raise ConfigError(
            f"the state needs {_bytes(size)} on each device, which has {_bytes(min(limits))}: give "
            "a smaller model, or shard it over more devices (--strategy sharded --mesh fsdp=N)"
        )


def device_memory(device: Device, count: int = 1) -> float | None:
    """The bytes that `device` may use, one of `count` of this process; None: not known."""
    if device.platform == "cpu":
        total = host_memory()
        return total and total / count
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int | None:
    """The bytes of memory of this machine, or of the container of this process; None: not known."""
    if not hasattr(os, "sysconf"):
        return None
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # there is no such group, or it has no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def _bytes(size: float) -> str:
    power = min(int(math.log(max(size, 1), 1000)), len(_UNITS) - 1)
    return f"{size / 1000**power:.3g} {_UNITS[power]}"
