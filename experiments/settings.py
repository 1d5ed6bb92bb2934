"""What the settings of all experiments share, and which of them a resumed run may change."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax

from experiments import machines, runs
from jaxformer.blocks import REMAT, MakeBlock
from jaxformer.config import ConfigError, check_least, check_names, check_share
from jaxformer.kernels import KERNELS, Auto, Choice, Kernel
from jaxformer.losses import Head, chunked, whole
from jaxformer.parallel import Devices, make_mesh, one_device, partition, replicate
from jaxformer.runtime import Tuning, tune

Parallel = Literal["one", "replicate", "partition"]
Remat = Literal["none", "attention", "matmuls", "blocks"]

_FREE = (
    "runs",
    "programs",
    "profile",
    "parallel",
    "mesh",
    "distributed",
    "coordinator",
    "processes",
    "index",
    "data.validation",
    "data.test",
)
_FREE_OF_TRAINING = (
    "log_every",
    "save_every",
    "evaluate_every",
    "patience",
    "average",
    "kernel",
    "remat",
    "loss_chunk",
)


@dataclass(frozen=True)
class TrainingConfig:
    """How often, and what is kept; intervals in steps, 0 switches off.

    Training ends early when validation has not become better for `patience` evaluations. The
    result is the mean of the last `average` checkpoints, or the best one where that validates
    better. `kernel` computes attention; "auto" takes the best one for each shape and prints which
    and why when the first step is traced. `remat` is what the backward pass computes a second
    time instead of keeping it: "none"; "attention", its scores and weights; "matmuls", all of a
    block but its matrix products with weights, which are kept; "blocks", all of it. `loss_chunk`:
    of how many tokens at a time there are logits in the loss, on each device; 0 is of all.
    """

    accumulation: int = 1
    ema_decay: float = 0.0
    seed: int = 0
    log_every: int = 100
    save_every: int = 1_000
    evaluate_every: int = 1_000
    patience: int = 0
    average: int = 5
    kernel: str = "reference"
    remat: Remat = "none"
    loss_chunk: int = 0

    def __post_init__(self):
        check_names(self)
        check_least(self, 1, "accumulation", "average")
        check_least(self, 0, "loss_chunk")
        check_share(self, "ema_decay")
        if self.kernel not in (*KERNELS, "auto"):
            known = ", ".join((*KERNELS, "auto"))
            raise ConfigError(f"kernel={self.kernel!r} is unknown: give one of {known}")

    @property
    def attention(self) -> Kernel:
        """The function that `kernel` names."""
        return Auto(tell=_tell) if self.kernel == "auto" else KERNELS[self.kernel]

    @property
    def block(self) -> MakeBlock:
        """What makes a block of the model."""
        return REMAT[self.remat]

    @property
    def head(self) -> Head:
        """How the loss gets to its logits."""
        return chunked(self.loss_chunk) if self.loss_chunk else whole


def _tell(choice: Choice) -> None:
    """Prints why a kernel was chosen; of several processes the first does."""
    if machines.is_first():
        print(choice, flush=True)


def tuned(runs: str, programs: str) -> Tuning:
    """Sets the process up for speed (see `runtime.tune`) and prints how.

    Compiled programs are kept in the folder `programs` of `runs`; empty: nowhere.
    """
    tuning = tune((Path(runs) / programs).absolute() if programs else None)
    if machines.is_first():
        print(tuning, flush=True)
    return tuning


def choose_devices(
    parallel: Parallel, mesh: str, options: Mapping[str, str] = MappingProxyType({})
) -> Devices:
    """Where a run's steps are made: on "one" device, or on all that JAX sees.

    "replicate" keeps a copy of the state on each, "partition" its parts on `mesh`, such as
    "data=2,fsdp=2,tensor=2" (empty: all of them along data). The compiler gets `options`, except
    for "replicate", where JAX takes none. Raises `ConfigError` for a mesh
    without "partition", or one that is not of as many devices.
    """
    if parallel == "partition":
        return partition(make_mesh(mesh or f"data={jax.device_count()}"), options=options)
    if mesh:
        raise ConfigError(f"mesh={mesh!r} needs --parallel partition, got parallel={parallel!r}")
    return replicate() if parallel == "replicate" else one_device(options=options)


def open_run(experiment: str, config: Any, *also_free: str) -> runs.Run:
    """The run of `config`; a resumed one may change what does not alter the steps already done.

    That are the fields named here and those in `also_free`, which only this experiment has. Of
    several processes the first opens it, and the others follow.
    """
    free = [*_FREE, *also_free]
    free += [f"training.{name}" for name in _FREE_OF_TRAINING]
    if config.optimizer.schedule != "cosine":
        free.append("optimizer.total_steps")
    with machines.together():
        if machines.is_first():
            return runs.open_run(config.runs, experiment, config.name, config, may_differ=free)
    return runs.Follower(Path(config.runs) / experiment / config.name)
