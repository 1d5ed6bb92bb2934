"""Connecting the processes of a program: the coordinator, and waiting for the others."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxformer.errors import ConfigError

_SAID_EVERY = 10.0
"""Seconds between two warnings that a process waits for others."""
_UNKNOWN_HOST = 20.0
"""Seconds in which a host that is not known may become known."""
_NEVER = 10**6
"""Seconds: JAX ends the process with a stack trace where its time is over."""

_log = logging.getLogger(__name__)


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
    `heartbeat` seconds, the others end (exit status 134, with the reason on stderr).

    Waiting for the other processes is logged every ten seconds, and a signal may end it. Raises
    `ConfigError` for incomplete or impossible arguments, if no cluster is found without arguments,
    and if not all processes are connected after `timeout` seconds; raises `RuntimeError` if it is
    called too late.

    >>> initialize("host0:1234", num_processes=2)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: coordinator=host0:1234, num_processes=2, process_id=None: ...
    """
    address: _Address | None = None
    if coordinator is not None and num_processes is not None and process_id is not None:
        address = _address_of(coordinator)
        if not 0 <= process_id < num_processes:
            raise ConfigError(
                f"process_id={process_id} is not one of num_processes={num_processes}: give a "
                "number from 0 to num_processes - 1"
            )
        if process_id == 0:
            _check_is_free(address)
    elif (coordinator, num_processes, process_id) != (None, None, None):
        raise ConfigError(
            f"coordinator={coordinator}, num_processes={num_processes}, process_id={process_id}: "
            "give all three, or none of them on a cluster"
        )
    # XLA runs programs that communicate in order, but not in a process with one device.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    def connect() -> None:
        if address is not None and process_id != 0:
            _wait_until_known(address, min(timeout / 2, _UNKNOWN_HOST))  # before `_wait_for` ends
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=_NEVER,
            shutdown_timeout_seconds=heartbeat,
        )

    place = f"at {coordinator}" if coordinator else "that the cluster's environment names"
    try:
        _wait_for(connect, f"process 0 {place}" if process_id else f"the others {place}", timeout)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"no cluster was found in the environment ({error}): give coordinator=HOST:PORT, "
            "num_processes and process_id"
        ) from error


class _Address(NamedTuple):
    """The address of the coordinator, which process 0 listens at."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _address_of(coordinator: str) -> _Address:
    """The parts of "HOST:PORT"; `ConfigError` for a text that is no address."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator={coordinator!r} is not an address: give HOST:PORT")
    if not 0 < int(port) < 2**16:
        raise ConfigError(
            f"coordinator={coordinator!r} has the port {port}, which does not exist: give "
            "HOST:PORT with a port from 1 to 65535"
        )
    return _Address(host, int(port))


def _check_is_free(address: _Address) -> None:
    """Raises `ConfigError` if this process cannot listen at the port of `address`."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # JAX listens there instead
        return
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # else the port of a process that has ended would not be free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", address.port))
        except OSError as error:
            raise ConfigError(
                f"process 0 cannot listen at coordinator={address} ({error.strerror}): give all "
                "processes another port"
            ) from error


def _wait_until_known(address: _Address, seconds: float) -> None:
    """Returns when the host of `address` has a number; `ConfigError` after some `seconds`.

    A cluster may not know a host yet that is about to start.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address.host.strip("[]"), address.port)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the host of coordinator={address} is not known ({error.strerror}): give the "
                    "name or the number of the host of process 0"
                ) from error
        time.sleep(0.5)


def _wait_for(connect: Callable[[], None], awaited: str, timeout: float) -> None:
    """Calls `connect` in a thread and returns when it does, raising what it raises.

    The main thread stays free for signals. What is `awaited` is logged. `ConfigError` after
    `timeout` seconds.
    """
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            connect()
        except BaseException as error:
            ends.put(error)
        else:
            ends.put(None)

    # Python does not wait for a daemon, which may wait for ever, when the process ends.
    threading.Thread(target=run, daemon=True, name="connect").start()
    begun = last_warning = time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            error = ends.get(timeout=0.2)
            if error is not None:
                raise error
            return
        now = time.monotonic()
        if now - begun >= timeout:
            raise ConfigError(
                f"waited {timeout:g} seconds for {awaited}: start all processes, with the same "
                "address, which each host must be able to reach"
            )
        if now - last_warning >= _SAID_EVERY:
            last_warning = now
            _log.warning("waiting for %s (%.0f of %g seconds)", awaited, now - begun, timeout)
