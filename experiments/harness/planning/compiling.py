"""Compiles a training step for shapes only, and reads memory and work from the compiled program."""

import math
import time
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import jax

from experiments.harness.planning.hlo import Program, Shape, origin
from jaxformer import distributed
from jaxformer.training.train_step import TrainState

# For a quick estimate by the CPU's compiler. Buffers are laid out before machine code is generated,
# so optimization of the code is off. The barriers stay: without them the compiler merges what remat
# recomputes with what it keeps.
CPU_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}

_NO_BUFFER = {
    "parameter",
    "constant",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "call",
    "conditional",
}


class Buffer(NamedTuple):
    """Temporary arrays of one size and dtype.

    `shape` is XLA's text of the most frequent shape; `size` is the bytes of one array; `count` the
    number of instructions that make one; `origin` the module of most of them, "loss" or "update"
    outside the model, "" where it is unknown.
    """

    shape: str
    size: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    origin: str


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
    buffers: tuple[Buffer, ...]

    @property
    def total(self) -> int:
        """Returns the bytes that a device needs for a step."""
        return self.arguments + self.results + self.temporary


class CompiledStep:
    """A training step compiled for shapes.

    Attributes: `state`, the shapes of the `TrainState`; `compiled`, what JAX returned; `seconds`,
    how long the compiler took.
    """

    def __init__(self, state: TrainState, compiled: jax.stages.Compiled, seconds: float) -> None:
        self.state = state
        self.compiled = compiled
        self.seconds = seconds

    @cached_property
    def program(self) -> Program:
        """The compiled program, read from its text."""
        return Program(self.compiled.as_text() or "")

    @cached_property
    def memory(self) -> StepMemory:
        """What the step needs, by the compiler's count."""
        state, found = self.state, self.compiled.memory_analysis()
        assert found is not None  # XLA has it on every device
        return StepMemory(
            parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            parameter_bytes=_bytes(state.params),
            optimizer_bytes=_bytes((state.opt_state, state.ema)),
            held=_bytes_held((state.params, state.opt_state, state.ema)),
            arguments=found.argument_size_in_bytes,
            results=found.output_size_in_bytes - found.alias_size_in_bytes,
            temporary=found.temp_size_in_bytes,
            buffers=largest_buffers(self.program),
        )


def compile_step(
    state: TrainState,
    step: distributed.CompiledStep,
    batch: Any,
    options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Compiles `step` for the shapes `state` and `batch`, which have shardings.

    Raises `ConfigError` where the devices do not divide the rows or the parameters.
    """
    lowered = step.lower(state, batch)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    return CompiledStep(state, compiled, time.perf_counter() - start)


def largest_buffers(program: Program, count: int = 5) -> tuple[Buffer, ...]:
    """Returns the `count` largest sizes of temporary arrays of a program, with padding.

    Results inside a fusion have no buffer. Arrays of one size may share memory.
    """
    made: dict[tuple[str, int], list[tuple[Shape, str]]] = {}
    seen: set[tuple[str, str]] = set()
    for run in program.executed:
        each = run.instruction
        is_view = each.opcode in _NO_BUFFER or each.opcode.endswith(("-start", "-done"))
        if is_view or (run.computation, each.name) in seen:
            continue
        seen.add((run.computation, each.name))
        for shape in each.shapes:
            if shape.sizes and not shape.on_chip:
                key = shape.dtype, shape.padded_bytes
                made.setdefault(key, []).append((shape, origin(each.op_name)))
    largest = sorted(made.items(), key=lambda item: item[0][1], reverse=True)[:count]
    return tuple(
        Buffer(_most_frequent(map(str, shapes)), size, len(shapes), _most_frequent(origins))
        for (_, size), pairs in largest
        for shapes, origins in [tuple(zip(*pairs, strict=True))]
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes_held(tree: Any) -> int:
    """Returns the bytes of `tree` on one device; its leaves have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _most_frequent(words: Iterable[str]) -> str:
    """Returns the most frequent non-empty word."""
    return next(iter(Counter(filter(None, words)).most_common(1)), ("", 0))[0]
