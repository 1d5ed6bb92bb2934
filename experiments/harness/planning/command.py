"""The command `plan`, given the batch, the training step and the FLOPs of an experiment."""

import contextlib
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.experimental import serialize_executable

from experiments.harness.planning import counting, targets
from experiments.harness.planning.accelerators import ACCELERATORS, start_devices
from experiments.harness.planning.compiled_report import describe_compiled, describe_shortage
from experiments.harness.planning.compiling import CPU_OPTIONS, CompiledStep, compile_step
from experiments.harness.planning.report import ASSUMPTIONS, advice, describe, gigabytes, predict
from experiments.harness.planning.targets import Compiler, Target, parse_target
from experiments.harness.training.training_config import choose_devices
from jaxformer.config import check_choices
from jaxformer.distributed import CountedJit, Strategy, parse_mesh
from jaxformer.distributed.counted_jit import is_out_of_memory
from jaxformer.errors import ConfigError
from jaxformer.nn.recipe import REMAT
from jaxformer.ops.attention import AttentionFn, AttentionSpec, AutoAttention, Selection, select
from jaxformer.training.train_step import TrainState

T = TypeVar("T")
_LOSS_CHUNK = 1_024  # tokens; matrix products of this size keep a GPU busy


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a run is planned for."""

    target: str = "h100"
    """The devices: h100, h100x8, v5e (one chip), v5e:4x4, 2xv5e:4x4 (slices); without a number as
    many as the mesh."""
    compiler: Compiler = "cpu"
    """The compiler: cpu estimates in seconds; tpu and cuda, the targets' own, take minutes."""
    utilization: float = 0.4
    """Share of the peak FLOP/s that the cpu estimate assumes where arithmetic limits a step."""
    alternatives: bool = False
    """Compiles once more for each option that lowers the memory of a step."""
    program: str = ""
    """File for the program of --compiler tpu or cuda, to load on the target."""

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]  # that of the experiment's configuration
        check_choices(self)
        target = parse_target(self.target)
        targets.check_compiler(self.compiler, target)
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(
                f"utilization={self.utilization}, but a share of peak lies in 0 < share <= 1"
            )
        if self.program and self.compiler == "cpu":
            raise ConfigError("--program needs --compiler tpu or cuda: a target loads it")


class PlannedTraining(NamedTuple):
    """The training of an experiment, as functions of its configuration.

    `batch(config)` is a batch of zeros with the largest shape; `build_model(config)` the model;
    `assemble(config, model, batch, devices)` gives what makes the initial state, and the step. A
    step has `flops(config)` and `tokens(config)`.
    """

    batch: Callable[[Any], Any]
    build_model: Callable[[Any], Any]
    assemble: Callable[[Any, Any, Any, Strategy], tuple[Callable[[], TrainState], CountedJit]]
    flops: Callable[[Any], int]
    tokens: Callable[[Any], int]


class AttentionCalls:
    """An attention function that notes what it is called with.

    Attributes: `calls`, a list of (name of the function that computes the call, what `select` says
    of it), without repetitions.
    """

    def __init__(self, attention_fn: AttentionFn, name: str) -> None:
        self.calls: list[tuple[str, Selection]] = []
        self._attention_fn = attention_fn
        self._name = name

    def __call__(self, q, k, v, mask, *, scale, bias=None, dropout=None):
        """What the attention function computes."""
        selection = select(AttentionSpec.create(q, k, v, mask, bias, dropout))
        call = (selection.name if self._name == "auto" else self._name), selection
        if call not in self.calls:
            self.calls.append(call)
        return self._attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout)


def with_options(presets: Mapping[str, Any], kind: Callable[..., T]) -> dict[str, T]:
    """Returns `presets` as the dataclass `kind`, which has further fields with defaults."""
    return {
        name: kind(**{field.name: getattr(preset, field.name) for field in fields(preset)})
        for name, preset in presets.items()
    }


def plan(config: Any, training: PlannedTraining) -> None:
    """Prints memory and time of a step of `config` on its target, and advice if it does not fit.

    `config` has the fields of `PlanOptions` besides those of the experiment. Raises `ConfigError`
    for a mesh that does not fit the devices, the batch or the parameters, and `MissingExtra`
    without the target's compiler.
    """
    target = parse_target(config.target)
    count = target.devices_of(math.prod(parse_mesh(config.mesh).values()), config.strategy)
    tokens, where = training.tokens(config), config.mesh or config.strategy
    print(f"{config.name}: a step of {tokens:,} tokens on {count} x {target.accelerator}, {where}")
    print(f"compiler            {_version(config.compiler)}", flush=True)
    if config.compiler == "cpu":
        start_devices(count)
        estimated, _ = compile_config(config, training)
        _print_estimate(config, training, estimated, target, count)
        step: CompiledStep | None = estimated
    else:
        step = _compile_for(config, training, target, count)
    if step is None:
        return
    changes = _changes(config)
    for sentence in advice(step.memory, target.accelerator, tuple(changes)):
        print(f"change: {sentence}")
    if config.compiler == "cpu":
        print(ASSUMPTIONS)
    if config.alternatives:
        for words, make in changes.items():
            print(f"with {words}: {_memory(make, training, target, step)}")


def compile_config(
    config: Any, training: PlannedTraining, devices: Any = None
) -> tuple[CompiledStep, list[tuple[str, Selection]]]:
    """Compiles the training step of `config` for `devices`, or for the CPU's; its attention calls.

    A call is (name of the attention function, what would be selected for it).
    """
    strategy = choose_devices(config.strategy, config.mesh, devices=devices)
    batch, model = training.batch(config), training.build_model(config)
    name = config.training.attention_fn
    attention = AttentionCalls(AutoAttention() if name == "auto" else model.attention_fn, name)
    model = model.clone(attention_fn=attention)
    make_state, step = training.assemble(config, model, batch, strategy)
    state = strategy.abstract(make_state)
    attention.calls.clear()  # of two rows, which is all that initialization needs
    options = CPU_OPTIONS if devices is None else None
    compiled = compile_step(state, step, strategy.abstract_batch(batch), options)
    return compiled, attention.calls


def _print_estimate(
    config: Any, training: PlannedTraining, step: CompiledStep, target: Target, count: int
) -> None:
    sizes = {"utilization": config.utilization, "devices": count}
    flops, traffic = training.flops(config), counting.traffic(step.program)
    accelerator = ACCELERATORS[target.accelerator]
    said = predict(flops, traffic, accelerator, dtype=config.model.dtype, **sizes)
    sizes |= {"flops": flops, "tokens": training.tokens(config)}
    print(describe(step, said, target.accelerator, **sizes))


def _compile_for(
    config: Any, training: PlannedTraining, target: Target, count: int
) -> CompiledStep | None:
    """Compiles for the target and prints the report; None where the step does not fit."""
    try:
        step, calls = compile_config(config, training, targets.devices(target, count))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(describe_shortage(error, target.accelerator))
        return None
    report = describe_compiled(
        step,
        target.accelerator,
        calls,
        flops=training.flops(config),
        tokens=training.tokens(config),
        devices=count,
        dtype=config.model.dtype,
    )
    print(report)
    if config.program:
        _write_program(step, Path(config.program))
    return step


def _version(compiler: Compiler) -> str:
    """The compiler's name and version."""
    names = {
        "cpu": ("jaxlib",),
        "tpu": ("libtpu",),
        "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    }
    for name in names[compiler]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}, JAX {jax.__version__}"
    return f"{names[compiler][0]} is not installed"


def _write_program(step: CompiledStep, path: Path) -> None:
    """Writes the program for `jax.experimental.serialize_executable.deserialize_and_load`."""
    with path.open("wb") as file:
        pickle.dump(serialize_executable.serialize(step.compiled), file)
    print(f"program             {gigabytes(path.stat().st_size)} in {path}")


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


def _memory(
    make: Callable[[], Any], training: PlannedTraining, target: Target, before: CompiledStep
) -> str:
    try:
        config = make()
        devices = None
        if config.compiler != "cpu":
            mesh = math.prod(parse_mesh(config.mesh).values())
            devices = targets.devices(target, target.devices_of(mesh, config.strategy))
        memory = compile_config(config, training, devices)[0].memory
    except ConfigError as error:
        return str(error)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "does not fit"
    saved = before.memory.total - memory.total
    change = f"{gigabytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return (
        f"{gigabytes(memory.total)} per device, {gigabytes(memory.temporary)} temporary, {change}"
    )
