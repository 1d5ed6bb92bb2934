"""Compiles a training step for shapes alone: its program, its memory and its attention calls."""

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from experiments.harness.planning.hlo import Program
from experiments.harness.training.session import choose_devices
from jaxformer import distributed
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

    `presets` are configurations by name. `prepare(config)` completes one with what a parent run or
    a pretrained folder says of the model. `batch(config)` is a batch of zeros with the largest
    shape; `build_model(config)` the model; `assemble(config, model, batch, devices)` gives what
    makes the initial state, and the step. A step has `flops(config)` and `tokens(config)`.
    `others(config, model, devices, params)` are functions that lower the other programs of a run,
    by name.
    """

    presets: dict[str, Any]
    prepare: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    build_model: Callable[[Any], Any]
    assemble: Callable[
        [Any, Any, Any, Strategy], tuple[Callable[[], TrainState], distributed.CompiledStep]
    ]
    flops: Callable[[Any], int]
    tokens: Callable[[Any], int]
    others: Callable[[Any, Any, Strategy, Any], dict[str, Callable[[], jax.stages.Lowered]]]


class StepMemory(NamedTuple):
    """State and memory (bytes) of a compiled training step.

    `parameters` is their number. `parameter_bytes` and `optimizer_bytes` (moments, averages) are
    those of all devices. All others are per device: `held` bytes of state, `arguments`, `results`
    that do not reuse an argument's memory, `temporary`.
    """

    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    held: int
    arguments: int
    results: int
    temporary: int

    @property
    def total(self) -> int:
        """The bytes that a device needs for a step."""
        return self.arguments + self.results + self.temporary


class OtherProgram(NamedTuple):
    """Another program of a run than its step."""

    name: str
    memory: int
    """The bytes that a device needs while the program runs, with the whole state."""
    attention: list["AttentionCall"] = []
    """The different calls of attention."""
    program: Program | None = None
    """None where nothing is compiled: averaging adds up pieces of files."""
    shortage: str = ""
    """The compiler's words where the program does not fit, else ""."""


@dataclass(frozen=True)
class CompiledStep:
    """A training step compiled for shapes, and the other programs of its run."""

    state: TrainState
    """The shapes of the state."""
    compiled: jax.stages.Compiled | None
    """None where the compiler refuses the step, for want of memory."""
    shortage: str
    """The compiler's words then, else ""."""
    num_shards: int
    """Into how many parts the devices divide the rows of a batch."""
    seconds: float
    """The compiler's time."""
    attention: list["AttentionCall"]
    """The different calls of attention."""
    compile_others: Callable[[], Iterator[OtherProgram]]
    temporary_share: float = 1.0
    """The share of the compiler's temporary memory that the target needs."""

    @cached_property
    def others(self) -> tuple[OtherProgram, ...]:
        """The other programs of the run, compiled."""
        return tuple(self.compile_others())

    @cached_property
    def program(self) -> Program:
        """The compiled program, read from its text."""
        return read_program(self.compiled)

    @cached_property
    def memory(self) -> StepMemory:
        """The memory that the step needs, by the compiler's count and `temporary_share`."""
        state = self.state
        held = bytes_per_device((state.params, state.opt_state, state.ema))
        arguments, results, temporary = held, 0, max(needed_bytes(self.shortage) - held, 0)
        if self.compiled:
            counted: Any = self.compiled.memory_analysis()
            arguments = counted.argument_size_in_bytes
            results = counted.output_size_in_bytes - counted.alias_size_in_bytes
            temporary = int(self.temporary_share * counted.temp_size_in_bytes)
        return StepMemory(
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            parameter_bytes=_bytes(state.params),
            optimizer_bytes=_bytes((state.opt_state, state.ema)),
            held=held,
            arguments=arguments,
            results=results,
            temporary=temporary,
        )


class Abstract(NamedTuple):
    """A run without arrays: its `attention` notes the calls of `model`; `state` is of shapes."""

    model: Any
    attention: "AttentionCalls"
    strategy: Strategy
    batch: Any
    state: TrainState
    step: distributed.CompiledStep


class AttentionCall(NamedTuple):
    """One call of attention in a program."""

    name: str
    """The attention function that computes it."""
    spec: AttentionSpec
    explanation: str
    """What `explain` says of it."""


class AttentionCalls:
    """The attention function `attention_fn`, called `name`, that notes its different calls."""

    def __init__(self, attention_fn: AttentionFn, name: str) -> None:
        self.calls: list[AttentionCall] = []
        self._attention_fn = attention_fn
        self._name = name

    def __call__(self, q, k, v, mask, *, bias=None, dropout=None, scale, **options):
        spec = AttentionSpec.create(q, k, v, mask, bias, dropout, **options)
        name = choose(spec).name if self._name == "auto" else self._name
        call = AttentionCall(name, spec, explain(spec))
        if call not in self.calls:
            self.calls.append(call)
        return self._attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)


def abstract_run(config: Any, training: PlannedTraining, devices: Any) -> Abstract:
    """The run of `config` on `devices`, or on those of this process's CPU."""
    strategy = choose_devices(config.strategy, config.mesh, devices=devices)
    batch, model = training.batch(config), training.build_model(config)
    name = config.training.attention_fn
    attention_fn = auto_attention if name == "auto" else model.attention_fn
    attention = AttentionCalls(attention_fn, name)
    model = model.clone(attention_fn=attention)
    strategy = strategy.for_model(model)
    make_state, step = training.assemble(config, model, batch, strategy)
    return Abstract(model, attention, strategy, batch, strategy.abstract(make_state), step)


def compile_step(config: Any, training: PlannedTraining, devices: Any = None) -> CompiledStep:
    """Compiles the training step of `config` for `devices`, or for those of this process's CPU.

    A program that the compiler refuses for want of memory is none that fits, and no error. Raises
    `ConfigError` where the devices do not divide the rows or the parameters.
    """
    model, attention, strategy, batch, state, step = abstract_run(config, training, devices)
    attention.calls.clear()  # of two rows, which is all that initialization needs
    parts = config.training.parts_on(strategy)
    options = CPU_OPTIONS if devices is None else None
    lowered = step.lower(state, strategy.abstract_batch(batch, parts))
    start = time.perf_counter()
    compiled, shortage = compile_lowered(lowered, options)
    seconds, calls = time.perf_counter() - start, list(attention.calls)

    def compile_others() -> Iterator[OtherProgram]:
        params = getattr(state, config.training.result_tree)
        held = bytes_per_device((state.params, state.opt_state, state.ema))
        for name, lower in training.others(config, model, strategy, params).items():
            attention.calls.clear()
            program, shortage = compile_lowered(lower(), options)
            memory = needed_bytes(shortage)
            if program:
                counted: Any = program.memory_analysis()
                memory = held - bytes_per_device(params) + counted.argument_size_in_bytes
                memory += counted.temp_size_in_bytes + counted.output_size_in_bytes
            yield OtherProgram(name, memory, list(attention.calls), read_program(program), shortage)
        # At the end the state is gone: the best parameters, and the mean that is being read.
        yield OtherProgram("averaging", 2 * bytes_per_device(state.params))

    shards = strategy.num_shards
    share = TPU_SHARE if devices is None else 1.0
    return CompiledStep(state, compiled, shortage, shards, seconds, calls, compile_others, share)


def read_program(compiled: jax.stages.Compiled | None) -> Program:
    """The instructions of a compiled program; none where there is no program."""
    return Program(compiled.as_text() or "" if compiled else "")


def compile_lowered(lowered: Any, options: Any = None) -> tuple[jax.stages.Compiled | None, str]:
    """The compiled program and "", or None and what the compiler says of the lack of memory."""
    try:
        return lowered.compile(compiler_options=options), ""
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


def needed_bytes(shortage: str) -> int:
    """The bytes that a refused program needs, by its compiler; 2^63 where it does not say them."""
    said = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", shortage)
    if said is None:
        return 2**63
    return int(float(said[1]) * 1024 ** " KMGT".index(said[2] or " "))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of `tree` on one device; its leaves have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
