"""The command `plan` of an experiment, of which only batch, model and FLOPs are its own."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

from experiments.planning.accelerators import Machine, start_devices
from experiments.planning.compiling import Compiled, compile_step
from experiments.planning.report import ASSUMPTIONS, advice, describe, gigabytes, predict
from experiments.settings import choose_devices
from jaxformer.blocks import REMAT
from jaxformer.config import ConfigError
from jaxformer.parallel import Devices, Program
from jaxformer.training import TrainState

T = TypeVar("T")
_CHUNK = 1_024  # tokens: products this large keep a GPU busy
Assembled = tuple[Callable[[], TrainState], Program]
"""What makes the first state, and the training step."""


class Subject(NamedTuple):
    """What is planned: `config` is the experiment's, with `machine` and `alternatives`.

    `batch(config)` is a batch of zeros of the largest shape, `assemble(config, batch, devices)`
    what training makes of it; a step costs `flops(config)` and is of `tokens(config)` tokens.
    """

    batch: Callable[[Any], Any]
    assemble: Callable[[Any, Any, Devices], Assembled]
    flops: Callable[[Any], int]
    tokens: Callable[[Any], int]


def with_machine(presets: Mapping[str, Any], kind: Callable[..., T]) -> dict[str, T]:
    """`presets` as the dataclass `kind`, which has the fields of theirs and more."""
    return {
        name: kind(**{field.name: getattr(preset, field.name) for field in fields(preset)})
        for name, preset in presets.items()
    }


def plan(config: Any, subject: Subject) -> None:
    """Prints what a step of `config` needs of its machine, and what to change if it is too much.

    Raises `ConfigError` for a mesh that does not fit the devices, the rows or the parameters.
    """
    machine: Machine = config.machine
    count = machine.count(config.parallel, config.mesh)
    start_devices(count)
    where = f"{count} x {machine.accelerator}, {config.mesh or config.parallel}"
    print(f"{config.name}: a step of {subject.tokens(config):,} tokens on {where}")
    compiled = compile_config(config, subject)
    flops = subject.flops(config)
    dtype = config.model.dtype
    said = predict(flops, compiled.all_traffic, machine, devices=count, dtype=dtype)
    sizes = {"flops": flops, "tokens": subject.tokens(config), "devices": count}
    print(describe(compiled, said, machine, **sizes))
    changes = _changes(config)
    for sentence in advice(compiled, machine, tuple(changes)):
        print(f"change: {sentence}")
    print(ASSUMPTIONS)
    if config.alternatives:
        for words, make in changes.items():
            print(f"with {words}: {_memory(make, subject, compiled)}")


def compile_config(config: Any, subject: Subject) -> Compiled:
    """The training step of `config`, on the devices that JAX has started with."""
    devices = choose_devices(config.parallel, config.mesh)
    batch = subject.batch(config)
    make_state, step = subject.assemble(config, batch, devices)
    return compile_step(devices, make_state, step, batch, parts=config.training.accumulation)


def _changes(config: Any) -> dict[str, Callable[[], Any]]:
    """Options that make intermediate results smaller, and the configuration with each."""
    training, model = config.training, config.model
    parts = 2 * training.accumulation
    found = {
        f"--training.accumulation {parts}": lambda: replace(
            config, training=replace(training, accumulation=parts)
        )
    }
    if not training.loss_chunk:
        found[f"--training.loss_chunk {_CHUNK}"] = lambda: replace(
            config, training=replace(training, loss_chunk=_CHUNK)
        )
    for name in _less_than(training.remat):
        found[f"--training.remat {name}"] = lambda name=name: replace(
            config, training=replace(training, remat=name)
        )
    if model.dtype != "bfloat16":
        found["--model.dtype bfloat16"] = lambda: replace(
            config, model=replace(model, dtype="bfloat16")
        )
    return found


def _less_than(remat: str) -> list[str]:
    """Those of `REMAT` that keep less."""
    names = list(REMAT)
    return names[names.index(remat) + 1 :]


def _memory(make: Callable[[], Any], subject: Subject, before: Compiled) -> str:
    try:
        compiled = compile_config(make(), subject)
    except ConfigError as error:
        return str(error)
    saved = before.memory - compiled.memory
    change = f"{gigabytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return (
        f"{gigabytes(compiled.memory)} a device, {gigabytes(compiled.temporary)} intermediate, "
        f"{change}"
    )
