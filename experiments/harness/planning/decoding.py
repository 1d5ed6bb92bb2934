"""A decoding step compiled for shapes: its time, its limit, and its largest costs.

The limit is the time to read the weights and the cache once. The cycles of the compiler leave out
the search for the largest logits and the latency of small collectives.
"""

import copy
import math
import re
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.harness.planning.compiling import (
    CPU_OPTIONS,
    Decoding,
    PlannedTraining,
    abstract_run,
    compile_lowered,
    needed_bytes,
)
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.kernel_cycles import take_schedules
from experiments.harness.planning.report import attention_lines, describe_shortage, gigabytes
from experiments.harness.planning.step_time import StepTime, step_time
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from jaxformer.distributed import Strategy
from jaxformer.nn.int8 import Int8, quantize
from jaxformer.ops.attention import Selection

_SHOWN = 5
_NAME = 50  # letters of an operation


class CompiledDecoding(NamedTuple):
    """A compiled program that decodes `texts`; bytes and times are those of a device."""

    texts: int
    is_estimate: bool
    """Whether the CPU's compiler compiled it for another device."""
    seconds: float
    """The compiler's time."""
    memory: int
    temporary: int
    shortage: str
    """What the compiler says where the program does not fit, else ""."""
    attention: list[tuple[str, Selection]]
    """As that of `CompiledStep`."""
    weights: float
    """Bytes of the weights that a step reads."""
    cache: float
    """Bytes of the keys and values that a step reads."""
    limit: float
    """Seconds to read both."""
    prompt: StepTime | None
    """The time before the first step, and after the last; None where no cycles are known."""
    step: StepTime | None
    costs: list[tuple[str, int]]
    """(operation, cycles) of the largest costs of a step."""


def compile_decoding(
    config: Any, training: PlannedTraining, work: Decoding, accelerator: str, devices: Any = None
) -> CompiledDecoding:
    """Compiles the decoding of `work` for `devices`, or for those of this process's CPU.

    Raises `ConfigError` for a model that does not decode, and for texts that do not fit it.
    """
    planned = training.decoding(config, work)
    model, attention, strategy, *_, state, _ = abstract_run(config, training, devices)
    params = getattr(state, config.training.result_tree)
    if work.int8:
        params, model = _quantized(model, params, strategy), Int8(model)
    attention.calls.clear()
    options = CPU_OPTIONS if devices is None else None
    lowered = planned.lower(model, strategy, params)
    start = time.perf_counter()
    compiled, shortage = compile_lowered(lowered, options)
    seconds = time.perf_counter() - start
    recipe = config.model
    weights = _weights(params, recipe)
    tokens = -(-work.texts // strategy.mesh.shape["data"]) * planned.cached_tokens
    heads = max(recipe.kv_heads / strategy.mesh.shape["tensor"], 1)
    numbers = tokens * heads * (recipe.key_size + recipe.value_size) * recipe.num_decoder_layers
    cache = numbers * jnp.dtype(recipe.dtype).itemsize
    memory, temporary = needed_bytes(shortage), 0
    if compiled:
        counted: Any = compiled.memory_analysis()
        temporary = counted.temp_size_in_bytes
        memory = counted.argument_size_in_bytes + temporary + counted.output_size_in_bytes
    schedules = take_schedules()
    prompt = step = None
    costs: list[tuple[str, int]] = []
    if compiled and devices is not None and accelerator in TPUS:
        specs = [selection.spec for _, selection in attention.calls]
        before, a_pass = split_at_tokens(Program(compiled.as_text() or ""))
        prompt, step = (step_time(part, accelerator, specs, schedules) for part in (before, a_pass))
        costs = largest_costs(a_pass)
    return CompiledDecoding(
        texts=work.texts,
        is_estimate=devices is None,
        seconds=seconds,
        memory=memory,
        temporary=temporary,
        shortage=shortage,
        attention=attention.calls,
        weights=weights,
        cache=cache,
        limit=(weights + cache) / ACCELERATORS[accelerator].bandwidth,
        prompt=prompt,
        step=step,
        costs=costs,
    )


def describe_decoding(decoding: CompiledDecoding, accelerator: str) -> str:
    """The report of a decoding: memory, attention, time, limit and costs."""
    compiled = f"compiled in         {decoding.seconds:.0f} s; compiled is not run"
    if decoding.shortage:
        return f"{compiled}\n{describe_shortage(decoding.shortage, accelerator)}"
    usable = ACCELERATORS[accelerator].usable_memory
    too_large = "MAY NOT FIT" if decoding.is_estimate else "DOES NOT FIT"
    fits = "fits" if decoding.memory <= usable else too_large
    weights, cache = gigabytes(decoding.weights), gigabytes(decoding.cache)
    lines = [
        compiled,
        f"memory per device   {gigabytes(decoding.memory)} of {gigabytes(usable)} that JAX may use "
        f"on {accelerator}: {fits}",
        f"  temporary         {gigabytes(decoding.temporary)}, the cache with it",
    ]
    if not decoding.is_estimate:
        lines += attention_lines(decoding.attention)
    lines.append(
        f"limit of a step     {_time(decoding.limit)}: to read weights ({weights}) + cache "
        f"({cache})"
    )
    if decoding.prompt is None or decoding.step is None:
        return "\n".join(lines)
    prompt, step = decoding.prompt, decoding.step
    seconds = max(step.total, decoding.limit)
    lines += [
        f"time of a step      {_time(seconds)}, {seconds / decoding.limit:.2f} x the limit: a "
        "prediction, never measured",
        f"  kernels           {_time(step.kernels)}, by the compiler's cycles",
        f"  collectives       {_time(step.collectives + step.asynchronous)}, modelled by link rate",
        f"speed               {decoding.texts / seconds:,.0f} tokens per second of all texts",
        f"before the steps    {_time(prompt.total)}: prompts, and weights as the step reads them",
        f"  flash attention   {_time(prompt.attention)} of it, by its kernels' schedules",
        "largest costs       (cycles of a step, share, operation)",
    ]
    lines += [
        f"  {cycles:>11,}  {cycles / step.cycles:>5.1%}  {_shortened(operation)}"
        for operation, cycles in decoding.costs
    ]
    return "\n".join(lines)


def split_at_tokens(program: Program) -> tuple[Program, Program]:
    """The part of `program` outside its loop over the tokens, and one pass of this loop."""
    body = next(
        each.loop_body
        for _, loops, _, each in program.executed
        if not loops and each.opcode == "while" and each.op_name.count("/") == 1
    )
    outside, inside = copy.copy(program), copy.copy(program)
    outside.executed = [each for each in program.executed if body not in each.loops]
    passed = [each for each in program.executed if body in each.loops]
    trips = min(each.times for each in passed)
    inside.executed = [each._replace(times=each.times // trips) for each in passed]
    return outside, inside


def largest_costs(program: Program) -> list[tuple[str, int]]:
    """(operation, cycles) of the most expensive operations; those of all blocks are one."""
    costs: Counter[str] = Counter()
    for times, _, _, each in program.executed:
        operation = each.op_name.rpartition("/while/body/")[2] or each.opcode
        operation = re.sub(r"/cond/branch_\d+_fun|/jit\(\w+\)", "", operation)
        costs[re.sub(r"blocks_\d+", "blocks_*", operation)] += times * each.cycles
    return costs.most_common(_SHOWN)


def _quantized(model: Any, params: Any, devices: Strategy) -> Any:
    """The shapes of the parameters in 8 bits, divided as XLA divides them."""
    with devices.active():
        jitted = jax.jit(partial(quantize, model))
        shardings = jitted.lower(params).compile().output_shardings
        shapes = jax.eval_shape(jitted, params)
    return jax.tree.map(lambda x, where: x.update(sharding=where), shapes, shardings)


def _weights(params: Any, recipe: Any) -> float:
    """Bytes of the weights that a decoding step reads on a device, in the dtype of the model."""
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        once = re.search(r"^encoder/|cross_attention/(key|value)/|source_embedding", name)
        if once or (name.startswith("embedding/") and not recipe.ties_output):
            continue  # read once, or only the rows of the tokens
        size = min(leaf.dtype.itemsize, jnp.dtype(recipe.dtype).itemsize)
        total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * size
    return total


def _shortened(operation: str) -> str:
    return operation if len(operation) <= _NAME else f"..{operation[2 - _NAME :]}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
