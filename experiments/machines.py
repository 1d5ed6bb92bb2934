"""A run of several processes: which they are, what one refuses all refuse, and the first writes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import commands, runs
from jaxformer import parallel
from jaxformer.config import ConfigError
from jaxformer.parallel import Devices

_OF_ANOTHER = ("Gloo", "NCCL", "Socket closed", "coordination service")  # in XLA's errors


def check(config: Any) -> None:
    """Raises `ConfigError` when the machines that `config` asks for contradict each other."""
    if config.distributed and _placed(config):
        raise ConfigError(
            "distributed=True reads coordinator, processes and index from the cluster, but "
            f"coordinator={config.coordinator!r}, processes={config.processes} and index="
            f"{config.index} were given: give one or the other"
        )
    if _several(config) and config.parallel == "one":
        raise ConfigError(
            "parallel='one' trains in one process, but several were asked for: give --parallel "
            "replicate or --parallel partition"
        )


@contextmanager
def joined(config: Any) -> Iterator[None]:
    """Within it this process is one of those that `config` asks for, and only the first prints.

    To be entered before anything touches a device, and left by all together. Raises `ConfigError`
    as `jaxformer.parallel.start` does, and when the processes have different settings.
    """
    if not _several(config):
        yield
        return
    parallel.start(config.coordinator or None, config.processes, config.index)
    given = runs.flat(runs.as_json(config))
    given.pop("index")
    parallel.agree({"experiment": type(config).__name__, "count of settings": len(given)})
    parallel.agree(given)
    with contextlib.ExitStack() as stack:
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        with blaming_the_dead():
            yield
        wait("end")  # whoever ends early would take the runtime from the others


@contextmanager
def blaming_the_dead() -> Iterator[None]:
    """Within it, a step that fails because another process is gone ends this one with a sentence.

    Where JAX's runtime notices first, it ends the process itself, with code 134.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(word in str(error) for word in _OF_ANOTHER):
            raise
        said = " ".join(str(error).split())
        raise SystemExit(f"another process has died, or its connection has: {said}") from error


def is_several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not is_several() or jax.process_index() == 0


def wait(name: str) -> None:
    """Returns when all processes are here."""
    if is_several():
        multihost_utils.sync_global_devices(name)


@contextmanager
def together() -> Iterator[None]:
    """All processes leave it together; where one fails, the others exit with its code."""
    if not is_several():
        yield
        return
    code = 0
    try:
        yield
    except BaseException as error:
        code = commands.exit_code(error)
        raise
    finally:
        codes = multihost_utils.process_allgather(np.int32(code))
    failed = np.flatnonzero(codes)
    if failed.size:
        print(f"error: process {failed[0]} has failed: see what it says", file=sys.stderr)
        raise SystemExit(int(codes[failed[0]]))


def agreed(number: float) -> float:
    """The first process's `number`, to the bit."""
    if not is_several():
        return number
    words = np.frombuffer(np.float64(number).tobytes(), np.uint32)
    return float(multihost_utils.broadcast_one_to_all(words).view(np.float64)[0])


def local(devices: Devices, tree: Any) -> Any:
    """`tree`, which lives on `devices`, as this process can use it without the others."""
    if not is_several():
        return tree
    return jax.device_put(devices.gather(tree), jax.local_devices()[0])


def _placed(config: Any) -> bool:
    return bool(config.coordinator) or (config.processes, config.index) != (None, None)


def _several(config: Any) -> bool:
    return config.distributed or _placed(config)
