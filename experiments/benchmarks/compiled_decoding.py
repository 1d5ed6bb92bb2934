"""A decoding step compiled for TPUs: `python -m experiments.benchmarks.compiled_decoding`.

Nothing is run, and no TPU is needed: libtpu (extra `compilers`) says the cycles of its kernels. The
limit of a step is the time to read weights and cache once. Each number becomes a line of
results.jsonl beside this file; `python -m experiments.results` makes the table of the page.
"""

import gc
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.report import evidence
from experiments.harness import cli, planning
from experiments.harness.planning.hlo import Program
from experiments.harness.training.utilization import ACCELERATORS
from experiments.language_modelling.presets import PRESETS
from experiments.results import FILE, append
from experiments.translation.presets import PRESETS as TRANSLATIONS
from jaxformer.decoding import Prompts
from jaxformer.distributed import Strategy, make_mesh, sharded
from jaxformer.errors import ConfigError
from jaxformer.nn.int8 import Int8, quantize
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.attention import AutoAttention
from jaxformer.pipelines import translate_ids
from jaxformer.pipelines.completion import Round, continue_ids

TABLE = "compiled_decoding"
_SHOWN = 5


class Case(NamedTuple):
    """`texts` of `length` tokens; of a translation also a source of that length, and `beams`."""

    preset: str
    texts: int
    length: int
    target: str = "v5e"
    mesh: str = "data=1"
    int8: bool = False
    beams: int = 1


_FOUR = "v5e:2x2", "tensor=4"
PROGRAMS = {
    "gpt2_124m, 1 text of 1,023 tokens": Case("gpt2_124m", 1, 1_023),
    "gpt2_124m, 32 texts of 1,023": Case("gpt2_124m", 32, 1_023),
    "llama3_8b, tensor=4, 1 text of 2,047": Case("llama3_8b", 1, 2_047, *_FOUR),
    "llama3_8b, tensor=4, 16 texts of 2,047": Case("llama3_8b", 16, 2_047, *_FOUR),
    "llama3_8b, int8, tensor=4, 1 text of 2,047": Case("llama3_8b", 1, 2_047, *_FOUR, int8=True),
    "wmt14_base, 64 sentences of 64, 4 beams": Case("wmt14_base", 64, 64, beams=4),
}


@dataclass(frozen=True)
class DecodingOptions:
    """The programs to compile."""

    only: tuple[str, ...] = ()
    """Names of programs, as the table has them; none: all."""
    results: Path = Path(__file__).with_name(FILE)
    """File to which a line for each number is added, in place of an earlier one."""

    def __post_init__(self):
        for name in set(self.only) - PROGRAMS.keys():
            raise ConfigError(f"only has {name!r}: give one of {'; '.join(PROGRAMS)}")


def main(options: DecodingOptions) -> None:
    """Compiles the programs one after the other, prints the numbers and adds them to the file."""
    for name in options.only or PROGRAMS:
        case = PROGRAMS[name]
        numbers, costs = measure(case)
        results = evidence(
            TABLE,
            f"jaxformer, {name}",
            numbers,
            f"{case.target} {case.mesh}, compiled, not run",
            command=f"python -m experiments.benchmarks.compiled_decoding --only {name!r}",
            versions={each: metadata.version(each) for each in ("jax", "libtpu")},
        )
        append(options.results, results)
        print(f"{name}: {', '.join(f'{key} {value:,}' for key, value in numbers.items())}")
        for operation, cycles in costs:
            print(f"  {cycles:>9,} cycles  {operation}")
        print("  compiled, not run", flush=True)
        gc.collect()  # a program takes gigabytes


def measure(case: Case) -> tuple[dict[str, float], list[tuple[str, int]]]:
    """The time, limit and memory of a step, and its largest costs in cycles."""
    target = planning.parse_target(case.target)
    mesh = make_mesh(case.mesh, planning.devices(target, target.count or 1))
    compiled, read = compile_case(case, sharded(mesh))
    step = a_pass(Program(compiled.as_text() or ""))
    time = planning.step_time(step, target.accelerator, ())
    limit = read / ACCELERATORS[target.accelerator].bandwidth
    costs: Counter[str] = Counter()
    for times, _, _, each in step.executed:
        operation = each.op_name.rpartition("/while/body/")[2] or each.opcode
        costs[re.sub(r"blocks_\d+", "blocks_*", operation)] += times * each.cycles
    memory = compiled.memory_analysis()
    assert memory is not None  # XLA has it on every device
    numbers = {
        "by cycles, ms": round(time.total * 1e3, 2),
        "limit, ms": round(limit * 1e3, 2),
        "of the limit": round(max(time.total / limit, 1.0), 2),
        "temporary, GiB": round(memory.temp_size_in_bytes / 2**30, 2),
    }
    return numbers, costs.most_common(_SHOWN)


def compile_case(case: Case, devices: Strategy) -> tuple[jax.stages.Compiled, float]:
    """The compiled program, and the bytes that a step reads on a device: weights and cache."""
    is_translation = case.preset in TRANSLATIONS
    config: Any = (TRANSLATIONS if is_translation else PRESETS)[case.preset]
    recipe = replace(config.model, max_len=max(config.model.max_len, case.length + 1))
    model: Any = (EncoderDecoder if is_translation else DecoderOnly)(recipe, AutoAttention())
    ids = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    init = partial(model.init, jax.random.key(0))
    shapes = jax.eval_shape(init, *[ids] * (2 if is_translation else 1))["params"]
    shardings = devices.for_model(model).shardings(shapes)
    params = jax.tree.map(lambda x, place: x.update(sharding=place), shapes, shardings)
    inputs: Any
    zeros = np.zeros(case.texts, np.int32)
    if is_translation:
        inputs = np.zeros((case.texts, case.length), np.int32), zeros
    else:
        prompts = Prompts(zeros, zeros, zeros, step_offset=np.int32(0))
        inputs = Round(zeros[:, None], zeros, prompts, jax.random.key(0), None)
    inputs = devices.abstract_divided(inputs, ("data",))
    with devices.active():
        if case.int8:
            jitted = jax.jit(partial(quantize, model))
            places = jitted.lower(params).compile().output_shardings
            shapes = jax.eval_shape(jitted, params)
            params = jax.tree.map(lambda x, place: x.update(sharding=place), shapes, places)
            model = Int8(model)
        if is_translation:
            search = replace(config.search, beam_size=case.beams, max_new_tokens=case.length)
            lowered = translate_ids.lower(model, params, *inputs, search=search, bos=1, pad=0)
        else:
            sampling = replace(config.sampling, max_new_tokens=case.length)
            settings = {"eos": (), "length": case.length, "known": recipe.vocab_size}
            lowered = continue_ids.lower(model, params, inputs, config=sampling, **settings)
        compiled = lowered.compile()
    heads = recipe.kv_heads / devices.mesh.shape["tensor"]
    keys = case.texts * case.length * (case.beams + is_translation)  # those of the source, once
    size = recipe.key_size + recipe.value_size
    cache = keys * heads * size * recipe.num_decoder_layers * jnp.dtype(recipe.dtype).itemsize
    return compiled, _weights(params, recipe) + cache


def a_pass(program: Program) -> Program:
    """One pass of the longest outer loop of `program`, that over the tokens."""
    cycles = Counter[str]()
    for times, loops, _, each in program.executed:
        cycles.update({loop: times * each.cycles for loop in loops[:1]})
    body = max(cycles, key=cycles.__getitem__)
    inside = [each for each in program.executed if each.loops[:1] == (body,)]
    trips = min(each.times for each in inside)
    program.executed = [each._replace(times=each.times // trips) for each in inside]
    return program


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


if __name__ == "__main__":
    cli.start(main, {"default": DecodingOptions()}, __doc__)
