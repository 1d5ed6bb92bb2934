"""A run of several processes: they start, fail and end together, and the first one writes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness import cli
from experiments.harness.cli import config_files
from jaxformer import distributed
from jaxformer.config import Checked, Count, Natural, to_plain
from jaxformer.errors import ConfigError

_LOST_PROCESS = ("Gloo", "NCCL", "Socket closed", "coordination service")
"""Words of XLA's errors where another process is gone."""


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Checked):
    """The processes that compute a command together."""

    rare_options: ClassVar = ("distributed", "coordinator", "num_processes", "process_id")
    """The options that --help shows last."""
    distributed: bool = False
    """Joins the processes that the cluster (SLURM, Cloud TPU, ...) has started."""
    coordinator: str = ""
    """HOST:PORT of process 0, where no cluster provides it; empty: none."""
    num_processes: Count | None = None
    """Number of processes, given with --coordinator only."""
    process_id: Natural | None = None
    """Number of this process, from 0, given with --coordinator only."""

    def __post_init__(self):
        super().__post_init__()
        if self.distributed and self._is_placed:
            raise ConfigError(
                "distributed=True reads coordinator, num_processes and process_id from the "
                f"cluster, but coordinator={self.coordinator!r}, num_processes="
                f"{self.num_processes} and process_id={self.process_id} were given: give one or "
                "the other"
            )

    @property
    def asks_for_several(self) -> bool:
        """Whether the command is computed by several processes."""
        return self.distributed or self._is_placed

    @property
    def _is_placed(self) -> bool:
        return bool(self.coordinator) or (self.num_processes, self.process_id) != (None, None)


def joins(main: Callable[[Any], None]) -> Callable[[Any], None]:
    """The command `main` within `joined` of its options."""

    def joined_main(options: Any) -> None:
        with joined(options):
            main(options)

    return joined_main


@contextmanager
def joined(config: ProcessOptions) -> Iterator[None]:
    """Within it this process is one of those that `config` asks for, and only the first prints.

    Enter it before anything touches a device, or when the processes have joined already; all leave
    it together. Raises `ConfigError` as `jaxformer.distributed.initialize` does, and when the
    processes have different settings.
    """
    if not config.asks_for_several:
        yield
        return
    if not jax.distributed.is_initialized():  # another run may have joined before, as of a sweep
        distributed.initialize(config.coordinator or None, config.num_processes, config.process_id)
    settings = config_files.flat(to_plain(config))
    settings.pop("process_id")
    kind = {"experiment": type(config).__name__, "count of settings": len(settings)}
    distributed.assert_processes_agree(kind)
    distributed.assert_processes_agree(settings)
    with contextlib.ExitStack() as stack:
        if not is_first():
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        with lost_process_explained():
            yield
        wait("end")  # a process that ends early would stop the runtime of the others


@contextmanager
def lost_process_explained() -> Iterator[None]:
    """Within it, a step that fails because another process is gone exits with code 1 and a message.

    If JAX's runtime notices first, after a minute without a heartbeat, it ends this process with
    code 134, and names the process.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # on CPUs a step itself raises
        if not any(word in str(error) for word in _LOST_PROCESS):
            raise
        raise SystemExit(
            "another process has died, or its connection has: start the same command again on all "
            "hosts, or on another number of them: it resumes from the newest checkpoint "
            f"({' '.join(str(error).split())})"
        ) from error


def is_several() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not is_several() or jax.process_index() == 0


def wait(name: str) -> None:
    """Returns when all processes have called it."""
    if is_several():
        multihost_utils.sync_global_devices(name)


@contextmanager
def together() -> Iterator[None]:
    """All processes leave the block together; where one fails, all exit with its code."""
    if not is_several():
        yield
        return
    code = 0
    try:
        yield
    except BaseException as error:
        code = cli.exit_code(error)
        raise
    finally:
        codes = multihost_utils.process_allgather(np.int32(code))
    failed = np.flatnonzero(codes)
    if failed.size:
        print(f"error: process {failed[0]} has failed: see its message", file=sys.stderr)
        raise SystemExit(int(codes[failed[0]]))
