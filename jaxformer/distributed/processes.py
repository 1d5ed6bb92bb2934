"""Several processes that run one program: connects them, and checks that they agree."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
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
    jaxformer.errors.ConfigError: coordinator, num_processes without process_id: give ...
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{', '.join(name for name in given if name not in missing)} without "
            f"{', '.join(missing)}: give all of {', '.join(given)}, or none of them on a cluster"
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
