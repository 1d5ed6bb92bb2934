"""Compiles the programs of a run for shapes alone: memory, attention calls, instructions."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from experiments.harness.planning.hlo import Program
from experiments.harness.planning.schedules import Schedule, take_schedules
from experiments.harness.training.devices import choose_devices
from experiments.harness.training.parameters import result_tree
from experiments.harness.training.task import Cost, MakeStep
from jaxformer.distributed import Strategy
from jaxformer.errors import is_out_of_memory
from jaxformer.ops.attention import AttentionFn, AttentionSpec, auto_attention, choose, explain
from jaxformer.training.train_step import TrainState

# For a quick estimate by the CPU's compiler. Buffers are laid out before machine code is generated,
# so optimization of the code is off. The barriers stay: without them the compiler merges what remat
# recomputes with what it keeps.
CPU_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}
TPU_SHARE = 0.42
"""The temporary memory of a step on a TPU over that by the CPU's compiler, which fuses less and has
float32 for bfloat16: 0.33 to 0.57 in nine steps that libtpu compiled for v5e chips."""


class PlannedTraining(NamedTuple):
    """The training of an experiment, as functions of its configuration.

    `prepare(config)` completes it with the sizes of a parent run or a pretrained folder.
    `batch(config)` is a batch of the largest shape, `cost(config)` the cost of a step on it.
    `build_model(config)` is the model, `make_step` makes its first state and its step.
    `others(config, model, devices, params)` are functions that lower the other programs of a run,
    by name.
    """

    prepare: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    build_model: Callable[[Any], Any]
    make_step: MakeStep
    cost: Callable[[Any], Cost]
    others: Callable[[Any, Any, Strategy, Any], dict[str, Callable[[], jax.stages.Lowered]]]


class AttentionCall(NamedTuple):
    """One call of attention: the name of the function that computes it, and what `explain` says."""

    name: str
    spec: AttentionSpec
    explanation: str


class PlannedProgram(NamedTuple):
    """A compiled program of a run, and the bytes that a device needs while it runs.

    `arguments` are the whole state and the program's batch, `results` those that do not reuse an
    argument's memory. `shortage` is the message of a compiler that refuses the program for want of
    memory; then, and where nothing is compiled, `program` has no instructions. `schedules` are the
    schedules of flash attention on a TPU by their instructions' names, where libtpu writes them.
    """

    name: str
    arguments: int
    results: int = 0
    temporary: int = 0
    attention: list[AttentionCall] = []
    program: Program = Program("")
    shortage: str = ""
    schedules: Mapping[str, Schedule] = MappingProxyType({})

    @property
    def memory(self) -> int:
        """The bytes of all on a device."""
        return self.arguments + self.results + self.temporary


class RunPlan(NamedTuple):
    """The shapes of a run's state, the parts into which its devices divide a batch, its programs.

    `programs` compiles each when it is asked for; the first is the training step.
    """

    state: TrainState
    num_shards: int
    programs: Iterator[PlannedProgram]


def plan_run(config: Any, training: PlannedTraining, devices: Any = None) -> RunPlan:
    """Plans the run of `config` for `devices`, or estimates it on this process's CPU.

    Raises `ConfigError` where the devices do not divide the rows or the parameters.
    """
    calls: list[AttentionCall] = []
    strategy = choose_devices(config.strategy, config.mesh, devices=devices)
    batch, model = training.batch(config), training.build_model(config)
    model = model.clone(attention_fn=_noting(calls, config.training.attention_fn, model))
    strategy = strategy.for_model(model)
    make_state, step = training.make_step(config, model, batch, strategy)
    state = strategy.abstract(make_state)
    params = result_tree(state, config.training)
    held = bytes_per_device((state.params, state.opt_state, state.ema))
    parts = config.training.parts_on(strategy)
    lower_step = {"step": lambda: step.lower(state, strategy.abstract_batch(batch, parts))}

    def programs() -> Iterator[PlannedProgram]:
        other_programs = training.others(config, model, strategy, params)
        for name, lower in (lower_step | other_programs).items():
            calls.clear()
            # A single device that is not here is in no mesh, and attention is chosen by the mesh.
            with jax.set_mesh(strategy.mesh):
                lowered, attention = lower(), list(calls)
            # The arguments of the step are the whole state, the other programs take its parameters.
            held_besides = 0 if name == "step" else held - bytes_per_device(params)
            share = TPU_SHARE if devices is None and name == "step" else 1.0
            try:
                compiled = lowered.compile(CPU_OPTIONS if devices is None else None)
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                temporary = max(needed_bytes(str(error)) - held, 0)
                shortage = str(error).partition("\n")[0]
                yield PlannedProgram(name, held, 0, temporary, attention, shortage=shortage)
                continue
            counted: Any = compiled.memory_analysis()
            yield PlannedProgram(
                name,
                held_besides + counted.argument_size_in_bytes,
                counted.output_size_in_bytes - counted.alias_size_in_bytes,
                int(share * counted.temp_size_in_bytes),
                attention,
                Program(compiled.as_text() or ""),
                schedules=take_schedules(),
            )
        # At the end the state is gone: the best parameters, and the mean that is being read.
        yield PlannedProgram("averaging", 2 * bytes_per_device(state.params))

    return RunPlan(state, strategy.num_shards, programs())


def _noting(calls: list[AttentionCall], name: str, model: Any) -> AttentionFn:
    """The attention function of `model`, which is called `name`; it notes its different calls."""
    attention_fn = auto_attention if name == "auto" else model.attention_fn

    def attend(q, k, v, mask, *, bias=None, dropout=None, scale, **options):
        spec = AttentionSpec.create(q, k, v, mask, bias, dropout, **options)
        call = AttentionCall(choose(spec).name if name == "auto" else name, spec, explain(spec))
        if call not in calls:
            calls.append(call)
        return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

    return attend


def needed_bytes(shortage: str) -> int:
    """The bytes that a refused program needs by its compiler; 2^63 where it does not say them."""
    needed = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", shortage)
    if needed is None:
        return 2**63
    return int(float(needed[1]) * 1024 ** " KMGT".index(needed[2] or " "))


def bytes_per_device(tree: Any) -> int:
    """The bytes of `tree` on one device; its leaves have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
