"""Several processes as one: started by JAX's own runtime, and checked to run the same thing."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.config import ConfigError


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    index: int | None = None,
    *,
    heartbeat: int = 60,
    timeout: int = 300,
) -> None:
    """Joins this process to the others; all their devices are then in `jax.devices()`.

    Without arguments the cluster's environment tells (SLURM, a TPU pod, Open MPI, Kubernetes);
    otherwise `coordinator` is "host:port" of process 0, and this is process `index` of
    `processes`. To be called before anything touches a device. After `heartbeat` seconds without
    a sign of a process the others end (exit status 134, with the reason on stderr), and so they
    do after `timeout` seconds if not all have come.

    Raises `ConfigError` when the arguments are incomplete or impossible, or are absent and the
    environment tells nothing; `RuntimeError` when it comes too late.
    """
    given = {"coordinator": coordinator, "processes": processes, "index": index}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{', '.join(given.keys() - set(missing))} without {', '.join(missing)}: give all of "
            f"{', '.join(given)}, or none on a cluster that tells"
        )
    if not missing:
        _check_place(coordinator, processes, index)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            index,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=timeout,
            shutdown_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        raise ConfigError(
            f"no cluster was found in the environment ({error}): give coordinator=HOST:PORT, "
            "processes and index"
        ) from error


def agree(facts: Mapping[str, Any]) -> None:
    """Raises `ConfigError` on every process, naming the fact, if the processes differ in one.

    `facts`: what must be the same everywhere (settings, fingerprints, the step restored), under
    the same names. A fact is compared by its `repr`. One process always agrees.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(fact).encode()).digest()[:8] for fact in facts.values()]
    mine = np.frombuffer(b"".join(digests), np.uint32).reshape(-1, 2)
    everyone = multihost_utils.process_allgather(mine)
    different = np.flatnonzero(np.any(everyone != everyone[:1], axis=(0, 2)))
    names = [list(facts)[i] for i in different]
    if names:
        here = "; ".join(f"{name}={facts[name]!r}" for name in names)
        raise ConfigError(
            f"the processes do not agree on {', '.join(names)}: process {jax.process_index()} of "
            f"{jax.process_count()} has {here}. Start all with the same settings and data"
        )


def _check_place(coordinator: str, processes: int, index: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator={coordinator!r} is no address: give HOST:PORT")
    if processes < 1:
        raise ConfigError(f"processes={processes}, but there is at least 1")
    if not 0 <= index < processes:
        raise ConfigError(
            f"index={index} of processes={processes}: they are numbered 0 to {processes - 1}"
        )
