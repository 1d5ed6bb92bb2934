"""A training step compiled for shapes alone, and what the compiler says of it."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.parallel import Devices, Program
from jaxformer.training import TrainState

# The plan is wanted, not the machine code: buffers are laid out before it is made. And barriers
# stay, without which the CPU compiler merges what remat computes twice with what it keeps.
_OPTIONS = {
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
    """Arrays of one size and kind among the program's intermediate results.

    `shape` as XLA writes it, the most frequent if there are several; `size` in bytes of one;
    `count` how many instructions make one; `origin` where in the model most of them stand
    ("loss" and "update" are outside of it), "" where the program does not say.
    """

    shape: str
    size: int
    count: int
    origin: str


class Compiled(NamedTuple):
    """A training step: its state, its memory and its work; bytes, and seconds of this machine.

    `parameters` is a number; `parameter_bytes` and `optimizer_bytes` (moments, averages) are of
    the whole state, `held` of what each device holds of it, as `gradient` is of its gradient.
    `arguments`, `results` (those not written over arguments) and `temporary` are a device's.
    `flops` and `traffic` (bytes read and written) are a device's too, by XLA's cost analysis,
    which counts one part of an accumulation; `parts` says how many there are.
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
        """Bytes that a device needs for a step."""
        return self.arguments + self.results + self.temporary

    @property
    def all_flops(self) -> float:
        """FLOPs of a device in a whole step, the optimizer's counted once for each part."""
        return self.flops * self.parts

    @property
    def all_traffic(self) -> float:
        """Bytes a device moves in a whole step; the optimizer reads and writes the state once."""
        optimizer = min(2 * self.held + self.gradient, self.traffic)
        return self.parts * (self.traffic - optimizer) + optimizer


def compile_step(
    devices: Devices,
    make_state: Callable[[], TrainState],
    step: Program,
    batch: Any,
    *,
    parts: int = 1,
) -> Compiled:
    """`step` compiled for the state that `make_state` would make, and batches shaped as `batch`.

    No state is made. Raises `ConfigError` where rows or parameters do not divide by the devices.
    """
    state = devices.abstract(make_state)
    shapes = jax.tree.map(_shape, devices.place(batch))
    start = time.perf_counter()
    compiled = step.lower(state, shapes).compile(compiler_options=_OPTIONS)
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
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
        buffers=largest_buffers(compiled.as_text()),
        seconds=seconds,
    )


def largest_buffers(program: str, count: int = 5) -> tuple[Buffer, ...]:
    """The `count` largest sizes of arrays that XLA's text `program` makes, largest first.

    What fused instructions make inside is no buffer. Arrays of one size may share memory.
    """
    made: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for line in _scheduled(program):
        found = _RESULT.match(line)
        if found is not None and found[3] not in _NO_BUFFER:
            size = _size(found[1], found[2])
            made.setdefault((found[1], size), []).append((found[2], _place(line)))
    largest = sorted(made.items(), key=lambda item: item[0][1], reverse=True)[:count]
    return tuple(
        Buffer(f"{kind}[{_usual(sizes)}]", size, len(sizes), _usual(origins))
        for (kind, size), pairs in largest
        for sizes, origins in [tuple(zip(*pairs, strict=True))]
    )


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes_held(tree: Any) -> int:
    """Bytes of `tree` on the device that holds most; its leaves have shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _scheduled(program: str) -> Iterator[str]:
    """The instructions that have buffers: of the entry, and of loops and calls from there."""
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
    """The computations that an instruction runs as they are: not what it fuses or reduces by."""
    if not re.search(r" (while|call|conditional)\(", line):
        return []
    found = (names.split(",") for names in _CALLED.findall(line))
    return [name.strip(" %{}") for names in found for name in names]


def _place(line: str) -> str:
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


def _usual(words: Iterable[str]) -> str:
    """The most frequent of `words` that are not empty."""
    return next(iter(Counter(filter(None, words)).most_common(1)), ("", 0))[0]


def _size(kind: str, sizes: str) -> int:
    bits = {"pred": 8}.get(kind) or int(re.sub(r"\D*(\d+).*", r"\1", kind) or 32)
    return math.prod(int(size) for size in sizes.split(",")) * max(bits // 8, 1)
