"""The processes of a program, and the mesh of their devices."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh

from jaxformer.errors import ConfigError

Device = Any
"""A `jax.Device`; JAX declares no type for it."""

AXES = ("data", "fsdp", "tensor")
"""The axes of a mesh.

"data" divides the rows of a batch, "fsdp" divides rows and parameters, "tensor" divides heads, the
feed-forward size F and the vocabulary V.
"""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of all three axes in "data=2,fsdp=2,tensor=2"; an absent axis has size 1.

    Raises `ConfigError` for an unknown or repeated axis and for a size that is not 1 or more.

    >>> parse_mesh("data=2,tensor=4")
    {'data': 2, 'fsdp': 1, 'tensor': 4}
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
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    sizes = parse_mesh(text)
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(sizes.values()) != len(devices):
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {product} needs {math.prod(sizes.values())} devices, but there are "
            f"{len(devices)}: give sizes whose product is {len(devices)}"
        )
    slices = _slices(devices)
    if sizes["data"] % len(slices):
        raise ConfigError(
            f"the chips are in {len(slices)} slices, between which only the data axis may lie, but "
            f"data={sizes['data']}: give a multiple of {len(slices)}"
        )
    shape = sizes["data"] // len(slices), sizes["fsdp"], sizes["tensor"]
    parts = [_arrange(shape, part) for part in slices]
    return Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slices(devices: Sequence[Device]) -> list[list[Device]]:
    """The devices of each slice of TPUs, in order; all together where they are no TPUs."""
    slices: dict[int, list[Device]] = {}
    for device in devices:
        index = getattr(device, "slice_index", 0) if hasattr(device, "coords") else 0
        slices.setdefault(index, []).append(device)
    return [slices[index] for index in sorted(slices)]


def _arrange(shape: tuple[int, int, int], devices: Sequence[Device]) -> np.ndarray:
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


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat: int = 60,
    timeout: int = 300,
) -> None:
    """Connects this process with the others; `jax.devices()` then lists the devices of all.

    Without arguments the cluster's environment is used (SLURM, a TPU pod, Open MPI, Kubernetes).
    Otherwise `coordinator` is "host:port" of process 0, and this is process `process_id` of
    `num_processes`. Call it before anything uses a device. If a process sends no heartbeat for
    `heartbeat` seconds, the others end (exit status 134, with the reason on stderr). They also end
    if not all processes are connected after `timeout` seconds.

    Raises `ConfigError` for incomplete or impossible arguments, and if no cluster is found without
    arguments; raises `RuntimeError` if it is called too late.

    >>> initialize("host0:1234", num_processes=2)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: coordinator, num_processes without process_id: give ...
    """
    values = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in values.items() if value is None]
    if 0 < len(missing) < len(values):
        raise ConfigError(
            f"{', '.join(name for name in values if name not in missing)} without "
            f"{', '.join(missing)}: give all of {', '.join(values)}, or none of them on a cluster"
        )
    if coordinator is not None and num_processes is not None and process_id is not None:
        _check_process(coordinator, num_processes, process_id)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=timeout,
            shutdown_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        raise ConfigError(
            f"no cluster was found in the environment ({error}): give coordinator=HOST:PORT, "
            "num_processes and process_id"
        ) from error


def assert_processes_agree(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` on every process, with the name, if a value differs between processes.

    `values`: what must be equal everywhere (settings, fingerprints, the restored step), under the
    same names. Values are compared by their `repr`. With one process nothing is checked.

    >>> assert_processes_agree({"seed": 0, "step": 100})
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in values.values()]
    mine = np.frombuffer(b"".join(digests), np.uint32).reshape(-1, 2)
    everyone = multihost_utils.process_allgather(mine)
    different = np.flatnonzero(np.any(everyone != everyone[:1], axis=(0, 2)))
    names = [list(values)[i] for i in different]
    if names:
        here = "; ".join(f"{name}={values[name]!r}" for name in names)
        raise ConfigError(
            f"the processes do not agree on {', '.join(names)}: process {jax.process_index()} of "
            f"{jax.process_count()} has {here}. Start all with the same settings and data"
        )


def _check_process(coordinator: str, num_processes: int, process_id: int) -> None:
    """Raises `ConfigError` for a malformed address or an impossible number."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator={coordinator!r} is not an address: give HOST:PORT")
    if num_processes < 1:
        raise ConfigError(f"num_processes={num_processes}, but it must be at least 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process_id={process_id} is not one of num_processes={num_processes}: give a number "
            f"from 0 to {num_processes - 1}"
        )
