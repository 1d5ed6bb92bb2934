"""Compiles a training step for shapes only, and reads memory and work from the compiler."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.distributed import CountedJit, Strategy
from jaxformer.training.train_step import TrainState

# Buffers are laid out before machine code is generated, so optimization of the code is off. The
# barriers stay: without them the CPU compiler merges what remat recomputes with what it keeps.
_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_RESULT = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_NO_BUFFER = {"parameter", "get-tuple-element", "bitcast", "constant"}


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


class Compiled(NamedTuple):
    """State, memory (bytes) and work of a compiled training step.

    `parameters` is their number. `parameter_bytes` and `optimizer_bytes` (moments, averages) are
    those of all devices. All others are per device: `held` bytes of state, `gradient` bytes,
    `arguments`, `results` that do not reuse an argument's memory, `temporary`; `flops` and
    `traffic` (bytes read and written) by XLA's cost analysis, which counts one of the `parts` of an
    accumulated gradient. `seconds` is the time of compilation.
    """

    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    held: int
    gradient: int
    arguments: int
    results: int
    temporary: int
    flops: float
    traffic: float
    parts: int
    buffers: tuple[Buffer, ...]
    seconds: float

    @property
    def memory(self) -> int:
        """Returns the bytes that a device needs for a step."""
        return self.arguments + self.results + self.temporary

    @property
    def all_flops(self) -> float:
        """Returns a device's FLOPs in a step; the optimizer is counted once for each part."""
        return self.flops * self.parts

    @property
    def all_traffic(self) -> float:
        """Returns the bytes that a device moves in a step; the optimizer moves its state once."""
        optimizer = min(2 * self.held + self.gradient, self.traffic)
        return self.parts * (self.traffic - optimizer) + optimizer


def compile_step(
    devices: Strategy,
    make_state: Callable[[], TrainState],
    step: CountedJit,
    batch: Any,
    *,
    parts: int = 1,
) -> Compiled:
    """Compiles `step` for the shapes of `make_state()` and of `batch`, without making a state.

    Raises `ConfigError` where the batch or the parameters are not divisible by the devices.
    """
    state = devices.abstract(make_state)
    shapes = jax.tree.map(_shape, devices.shard_batch(batch))
    start = time.perf_counter()
    compiled = step.lower(state, shapes).compile(compiler_options=_OPTIONS)
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory and cost  # XLA has both on every device
    return Compiled(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parameter_bytes=_bytes(state.params),
        optimizer_bytes=_bytes((state.opt_state, state.ema)),
        held=_bytes_held((state.params, state.opt_state, state.ema)),
        gradient=_bytes_held(state.params),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        flops=cost["flops"],
        traffic=cost["bytes accessed"],
        parts=parts,
        buffers=largest_buffers(compiled.as_text() or ""),
        seconds=seconds,
    )


def largest_buffers(program: str, count: int = 5) -> tuple[Buffer, ...]:
    """Returns the `count` largest sizes of temporary arrays in XLA's text `program`.

    Results inside a fusion have no buffer. Arrays of one size may share memory.
    """
    made: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for line in _instructions(program):
        found = _RESULT.match(line)
        if found is not None and found[3] not in _NO_BUFFER:
            size = _bytes_of(found[1], found[2])
            made.setdefault((found[1], size), []).append((found[2], _origin(line)))
    largest = sorted(made.items(), key=lambda item: item[0][1], reverse=True)[:count]
    return tuple(
        Buffer(f"{kind}[{_most_frequent(sizes)}]", size, len(sizes), _most_frequent(origins))
        for (kind, size), pairs in largest
        for sizes, origins in [tuple(zip(*pairs, strict=True))]
    )


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes_held(tree: Any) -> int:
    """Returns the bytes of `tree` on one device; its leaves have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _instructions(program: str) -> Iterator[str]:
    """Yields the instructions with buffers: those of the entry, its loops and its calls."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    waiting, seen = [entry], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        yield from bodies[name]
        waiting += [called for line in bodies[name] for called in _calls(line)]


def _calls(line: str) -> list[str]:
    """Returns the computations that a loop, call or conditional runs."""
    if not re.search(r" (while|call|conditional)\(", line):
        return []
    found = (names.split(",") for names in _CALLED.findall(line))
    return [name.strip(" %{}") for names in found for name in names]


def _origin(line: str) -> str:
    """jit(step)/jvp(DecoderOnly)/decoder/blocks_3/attention/exp -> decoder/blocks_*/attention."""
    origin = _ORIGIN.search(line)
    if origin is None:
        return ""
    *words, _ = origin[1].split("/")
    inside = [i for i, word in enumerate(words) if "jvp(" in word]
    if not inside:
        return "update"
    path = [word for word in words[inside[-1] + 1 :] if "(" not in word and word[0].islower()]
    return re.sub(r"_\d+", "_*", "/".join(path)) or "loss"


def _most_frequent(words: Iterable[str]) -> str:
    """Returns the most frequent non-empty word."""
    return next(iter(Counter(filter(None, words)).most_common(1)), ("", 0))[0]


def _bytes_of(kind: str, sizes: str) -> int:
    bits = {"pred": 8}.get(kind) or int(re.sub(r"\D*(\d+).*", r"\1", kind) or 32)
    return math.prod(int(size) for size in sizes.split(",")) * max(bits // 8, 1)
