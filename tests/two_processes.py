"""Two processes with two devices each, which run the same code on a state that all four share."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

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


def run(code: str, folder: str | Path) -> list[Ended]:
    """Runs `code` in both; it knows `folder`, `spread`, `state(step)` and `check(array, step)`."""
    code = textwrap.dedent(_BEGINNING) + textwrap.dedent(code)
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", code, str(folder), f"127.0.0.1:{free_port()}"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*words, index], env=environment, stdout=pipe, stderr=pipe, text=True)
        for index in "01"
    ]
    said = [process.communicate(timeout=120) for process in processes]
    return [Ended(one.returncode, *texts) for one, texts in zip(processes, said, strict=True)]


def free_port() -> int:
    """A port of the loopback address that no process listens to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
