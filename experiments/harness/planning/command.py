"""The command `plan`, given the batch, the training step and the FLOPs of an experiment."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from experiments.harness.planning.accelerators import Machine, start_devices
from experiments.harness.planning.compiling import Compiled, compile_step
from experiments.harness.planning.report import ASSUMPTIONS, advice, describe, gigabytes, predict
from experiments.harness.training_config import choose_devices
from jaxformer.distributed import CountedJit, Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import REMAT
from jaxformer.training.train_step import TrainState

T = TypeVar("T")
_LOSS_CHUNK = 1_024  # tokens; matrix products of this size keep a GPU busy
Assembled = tuple[Callable[[], TrainState], CountedJit]
"""(make_state, training step)"""


class PlannedTraining(NamedTuple):
    """The training of an experiment, as functions of its configuration.

    `batch(config)` is a batch of zeros with the largest shape; `assemble(config, batch, devices)`
    gives the initial state and the step. A step has `flops(config)` and `tokens(config)`.
    """

    batch: Callable[[Any], Any]
    assemble: Callable[[Any, Any, Strategy], Assembled]
    flops: Callable[[Any], int]
    tokens: Callable[[Any], int]


def with_machine(presets: Mapping[str, Any], kind: Callable[..., T]) -> dict[str, T]:
    """Returns `presets` as the dataclass `kind`, which has further fields with defaults."""
    return {
        name: kind(**{field.name: getattr(preset, field.name) for field in fields(preset)})
        for name, preset in presets.items()
    }


def plan(config: Any, training: PlannedTraining) -> None:
    """Prints memory and time of a step of `config` on its machine, and advice if it does not fit.

    `config` has the fields `machine` and `alternatives` besides those of the experiment. Raises
    `ConfigError` for a mesh that does not fit the devices, the batch or the parameters.
    """
    machine: Machine = config.machine
    count = machine.count(config.strategy, config.mesh)
    start_devices(count)
    where = f"{count} x {machine.accelerator}, {config.mesh or config.strategy}"
    print(f"{config.name}: a step of {training.tokens(config):,} tokens on {where}")
    compiled = compile_config(config, training)
    flops = training.flops(config)
    dtype = config.model.dtype
    said = predict(flops, compiled.all_traffic, machine, devices=count, dtype=dtype)
    sizes = {"flops": flops, "tokens": training.tokens(config), "devices": count}
    print(describe(compiled, said, machine, **sizes))
    changes = _changes(config)
    for sentence in advice(compiled, machine, tuple(changes)):
        print(f"change: {sentence}")
    print(ASSUMPTIONS)
    if config.alternatives:
        for words, make in changes.items():
            print(f"with {words}: {_memory(make, training, compiled)}")


def compile_config(config: Any, training: PlannedTraining) -> Compiled:
    """Compiles the training step of `config` for the devices of its mesh."""
    devices = choose_devices(config.strategy, config.mesh)
    batch = training.batch(config)
    make_state, step = training.assemble(config, batch, devices)
    return compile_step(devices, make_state, step, batch, parts=config.training.grad_accumulation)


def _changes(config: Any) -> dict[str, Callable[[], Any]]:
    """Returns options that reduce temporary memory, each with its configuration."""
    training, model = config.training, config.model
    parts = 2 * training.grad_accumulation
    found: dict[str, Callable[[], Any]] = {
        f"--training.grad_accumulation {parts}": lambda: replace(
            config, training=replace(training, grad_accumulation=parts)
        )
    }
    if not training.loss_chunk:
        found[f"--training.loss_chunk {_LOSS_CHUNK}"] = lambda: replace(
            config, training=replace(training, loss_chunk=_LOSS_CHUNK)
        )
    for name in _less_than(training.remat):
        found[f"--training.remat {name}"] = partial(_with_remat, config, name)
    if model.dtype != "bfloat16":
        found["--model.dtype bfloat16"] = lambda: replace(
            config, model=replace(model, dtype="bfloat16")
        )
    return found


def _with_remat(config: Any, name: str) -> Any:
    return replace(config, training=replace(config.training, remat=name))


def _less_than(remat: str) -> list[str]:
    """Returns the names in `REMAT` that keep less."""
    names = list(REMAT)
    return names[names.index(remat) + 1 :]


def _memory(make: Callable[[], Any], training: PlannedTraining, before: Compiled) -> str:
    try:
        compiled = compile_config(make(), training)
    except ConfigError as error:
        return str(error)
    saved = before.memory - compiled.memory
    change = f"{gigabytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return (
        f"{gigabytes(compiled.memory)} per device, {gigabytes(compiled.temporary)} temporary, "
        f"{change}"
    )
