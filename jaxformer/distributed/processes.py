"""The processes of a program: how they find each other, agree, and share arrays."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec, Sharding

from jaxformer.distributed.gathering import BATCH_AXES
from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten


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
    jaxformer.errors.ConfigError: coordinator=host0:1234, num_processes=2, process_id=None: ...
    """
    if coordinator is not None and num_processes is not None and process_id is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"coordinator={coordinator!r} is not an address: give HOST:PORT")
        if not 0 <= process_id < num_processes:
            raise ConfigError(
                f"process_id={process_id} is not one of num_processes={num_processes}: give a "
                "number from 0 to num_processes - 1"
            )
    elif (coordinator, num_processes, process_id) != (None, None, None):
        raise ConfigError(
            f"coordinator={coordinator}, num_processes={num_processes}, process_id={process_id}: "
            "give all three, or none of them on a cluster"
        )
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


def row_spec(leaf: Any, axes: tuple[str, ...] = BATCH_AXES) -> PartitionSpec:
    """The spec of a leaf of a batch: mesh `axes` divide its rows; a scalar is not divided."""
    return PartitionSpec(axes) if jnp.ndim(leaf) else PartitionSpec()


def check_rows(batch: Any, num_shards: int, grad_accumulation: int = 1, share: float = 1.0) -> None:
    """Raises `ConfigError` for rows that shards times parts of the batch do not divide.

    A leaf has 1 / `share` of the rows of the global batch.
    """
    need = num_shards * grad_accumulation
    for path, leaf in flatten(batch).items():
        rows = int(leaf.shape[0] * share) if jnp.ndim(leaf) else 0
        if rows % need:
            raise ConfigError(
                f"{path} has {rows} rows, but {num_shards} shards x grad_accumulation="
                f"{grad_accumulation} need a multiple of {need}: change one of the three"
            )


def pad_rows(leaf: np.ndarray, parts: int) -> np.ndarray:
    """`leaf` with rows of zeros at its end, so that `parts` divide their number."""
    if leaf.ndim == 0:
        return leaf
    return np.pad(leaf, [(0, -len(leaf) % parts), *[(0, 0)] * (leaf.ndim - 1)])


def global_array(
    leaf: Any, sharding: Sharding, local_shards: tuple[int, ...] = (0,), num_shards: int = 1
) -> jax.Array:
    """The array of all processes, of which this one has built the rows `leaf`; by default all.

    `local_shards` are the numbers of its shards among `num_shards`.
    """
    leaf = np.asarray(leaf)
    leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    if leaf.ndim == 0 or num_shards == 1:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
    size = len(leaf) // len(local_shards)
    shape = (size * num_shards, *leaf.shape[1:])

    def part(index: Any) -> np.ndarray:
        first = local_shards.index(index[0].indices(shape[0])[0] // size) * size
        return leaf[first : first + size]

    return jax.make_array_from_callback(shape, sharding, part)


def to_numpy(leaf: Any) -> np.ndarray:
    """The whole array in numpy on every process; a PRNG key as its key data."""
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
