"""The processes of a program: how they find each other, agree, and share arrays."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.errors import ConfigError


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
    # XLA runs programs that communicate in order, but not those of a process with one device.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
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


def agreed(number: float) -> float:
    """The `number` of the first process, in every process."""
    if jax.process_count() == 1:
        return number
    words = np.frombuffer(np.float64(number).tobytes(), np.uint32)
    try:
        return float(multihost_utils.broadcast_one_to_all(words).view(np.float64)[0])
    except ValueError as error:  # `jax.jit` raises it when another process is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error


def to_numpy(leaf: Any) -> np.ndarray:
    """The whole array in numpy on every process; a PRNG key as its key data."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys."""
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
