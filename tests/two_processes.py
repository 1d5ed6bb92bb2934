"""Processes that tests start, and two with two devices each on a state that all four share."""

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BEGINNING = """
    import sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxformer.checkpoint import Checkpoints

    folder, address, index = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(index))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))

    def state(step):
        fill = lambda: {"params": {"w": jnp.arange(24.0).reshape(8, 3) + step}}
        return jax.jit(fill, out_shardings=spread)()

    def check(array, step):
        for mine, right in zip(array.addressable_shards,
                               state(step)["params"]["w"].addressable_shards):
            assert np.array_equal(mine.data, right.data)
"""


class Ended(NamedTuple):
    """The exit code of a process and what it wrote."""

    code: int
    out: str
    err: str


def start(
    *words: object,
    folder: str | Path = ROOT,
    devices: int = 1,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen:
    """Python with `words` in `folder`, which finds this checkout and so many devices of a CPU."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*processes: subprocess.Popen, timeout: float = 600.0) -> list[Ended]:
    """The ends of processes, which are killed after `timeout` seconds."""
    with ThreadPoolExecutor(len(processes)) as pool:  # none waits for a pipe that nobody reads
        try:
            said = list(pool.map(lambda process: process.communicate(timeout=timeout), processes))
        finally:
            for process in processes:
                process.kill()
    return [Ended(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def finished(*processes: subprocess.Popen, timeout: float = 600.0) -> list[Ended]:
    """The ends of processes, all of which end with 0."""
    found = ended(*processes, timeout=timeout)
    assert [process.code for process in found] == [0] * len(found), found
    return found


def run(code: str, folder: str | Path) -> list[Ended]:
    """Runs `code` in both; it knows `folder`, `spread`, `state(step)` and `check(array, step)`."""
    code = textwrap.dedent(_BEGINNING) + textwrap.dedent(code)
    address = f"127.0.0.1:{free_port()}"
    return ended(*(start("-c", code, folder, address, index, devices=2) for index in range(2)))


def free_port() -> int:
    """A port of the loopback address that no process listens to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
