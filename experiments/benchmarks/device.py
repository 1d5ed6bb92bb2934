"""Checks a device: `python -m experiments.benchmarks.device`.

Attention functions, products, collectives of the mesh, a training step and a decoding step: each is
compared with the truth, then timed. Prints a table to paste into an issue, writes all numbers to
RUNS/benchmarks/NAME.json, and ends with code 1 where a check failed. Of several hosts each starts
it, with the options of `train`.
"""

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from experiments.benchmarks.attention import Shape, find_attention, jax_attention
from experiments.benchmarks.collective_cases import COLLECTIVES, collective
from experiments.benchmarks.greedy_text import GreedyText, jax_sample
from experiments.benchmarks.timing import Case, CaseFailed, environment
from experiments.benchmarks.train import GPT2_WORK, StepWork, jax_step
from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.planning.targets import TPUS
from experiments.harness.results.tables import Table, plain
from experiments.harness.runs import distributed
from experiments.harness.runs.rounding import rounded
from experiments.harness.training.chips import ACCELERATORS, DEVICE_KINDS, peak_of
from experiments.harness.training.device_check import compare, compare_products
from experiments.harness.training.devices import choose_devices
from experiments.harness.training.training_config import DeviceChoice
from jaxformer import __version__
from jaxformer.config import Count, Positive, with_fields
from jaxformer.distributed import Strategy, single
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import KERNELS, AttentionSpec, DeviceInfo
from jaxformer.records import write_json
from jaxformer.runtime import setup_process

CHECKS = ("attention", "products", "collectives", "training", "decoding")
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 170},
    "segments": {"causal": True, "segments": True},
    "padding": {"padding_mask": True},
    "dropout": {"causal": True, "dropout": 0.1},
    "soft cap": {"causal": True, "softcap": 30.0},
    "bias": {"bias": True},
    "explicit": {"explicit": True},
    "grouped": {"causal": True, "kv_heads": 1},
    "float32": {"causal": True, "dtype": "float32"},
}
"""Fields of an `AttentionSpec`, by the kind of call."""
_STEPS = 3
"""Training steps whose losses and gradient norms are compared."""
_TOLERANCES = {"bfloat16": (2e-3, 2e-2), "float32": (1e-5, 1e-4)}
"""dtype -> the relative difference of (loss, gradient norm) that rounding may make in `_STEPS`."""
_WIDTH = 80
"""Columns of what is printed."""
_VERSIONS = {
    "jax": metadata.version("jax"),
    "jaxlib": metadata.version("jaxlib"),
    "jaxformer": __version__,
}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(DeviceChoice):
    """The checks, and the sizes of what is timed."""

    only: tuple[str, ...] = CHECKS
    """attention, products, collectives, training, decoding."""
    attention_fns: tuple[str, ...] = tuple(kernel.name for kernel in KERNELS)
    """Attention functions; also your own as package.module:name."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of attention calls that are compared with reference."""
    shape: Shape = Shape(8, 1_024, 12, 64, "bfloat16")
    """The attention call that is timed, and in small compared."""
    product_size: Count = 8_192
    """Rows and columns of the matrices whose product is timed."""
    collective_mb: Positive = 64.0
    """Megabytes on each device of the collectives that are timed."""
    work: StepWork = replace(GPT2_WORK, model=replace(GPT2_WORK.model, scan_layers=True))
    """The training step, of blocks compiled once; its batch is for each part of the mesh."""
    decoding: GreedyText = GreedyText(model=with_fields(GPT2_WORK.model, {"max_len": 256}))
    """The generation, on one device."""
    repetitions: Count = 10
    """Repetitions of each measurement, after one that is not counted."""
    name: str = "device"
    """Name of the result file, RUNS/benchmarks/NAME.json."""
    runs: str = "runs"
    """Folder of all runs."""

    def __post_init__(self):
        super().__post_init__()
        for field, known in (("only", CHECKS), ("kinds", KINDS)):
            for name in set(getattr(self, field)) - set(known):
                raise ConfigError(f"{field} has {name!r}: give some of {', '.join(known)}")


_SMALL = with_fields(
    GPT2_WORK.model,
    {"vocab_size": 41, "d_model": 16, "d_ff": 24, "num_heads": 2, "num_decoder_layers": 1},
)
PRESETS = {
    "default": DeviceOptions(),
    "small": DeviceOptions(
        kinds=("causal",),
        shape=Shape(2, 37, 3, 8),
        product_size=53,
        collective_mb=0.01,
        work=StepWork(model=_SMALL, batch_size=2, seq_len=13, attention_fn="auto"),
        decoding=GreedyText(model=replace(_SMALL, max_len=19), batch_size=2, prompt_len=5),
        repetitions=1,
        name="device_small",
    ),
}


class Row(NamedTuple):
    """The outcome of a check: why it failed, else "", and its numbers by their units."""

    check: str
    failure: str
    numbers: dict[str, float]


Measure = Callable[[], dict[str, float]]
"""It returns numbers by their units, and raises what fails."""


def main(options: DeviceOptions) -> None:
    """Checks, prints the table, writes the file; exits with code 1 where a check failed."""
    with distributed.joined(options), display.opened():
        setup = setup_process()
        devices = choose_devices(options.strategy, options.mesh, setup.compiler_options)
        rows: list[Row] = []
        for name, measure in checks(options, devices):
            rows.append(agreed_row(checked(name, measure)))
            if distributed.is_first():  # at once: a later check may be cut off
                write(rows, devices, options)
        print(describe(rows, devices, options), flush=True)
    failed = sum(bool(row.failure) for row in rows)
    if failed:
        raise SystemExit(f"{failed} of {len(rows)} checks failed")


def checks(options: DeviceOptions, devices: Strategy) -> Iterator[tuple[str, Measure]]:
    """The name and the function of each check."""
    if "attention" in options.only:
        for name in options.attention_fns:
            calls = supported_calls(name, options)
            if calls:
                yield f"attention {name}", partial(attention, name, calls, options)
    if "products" in options.only:
        for dtype in ("bfloat16", "float32"):
            yield f"products {dtype}", partial(products, dtype, options)
    if "collectives" in options.only:
        for axis, size in devices.mesh.shape.items():
            if size == 1:
                continue
            for name in COLLECTIVES:
                measure = partial(communication, name, axis, options, devices)
                yield f"{name} {axis}={size}", measure
    if "training" in options.only:
        yield "training step", partial(training, options, devices)
    if "decoding" in options.only:
        yield "decoding step", partial(decoding, options)


def supported_calls(name: str, options: DeviceOptions) -> dict[str, AttentionSpec]:
    """Kind -> call, of the kinds that the attention function `name` supports on this device.

    A function of your own is taken to support all.
    """
    shape = options.shape
    kernel = next((each for each in KERNELS if each.name == name and each.device), None)
    calls = {}
    for kind in options.kinds:
        sizes = {
            "batch": shape.batch_size,
            "queries": shape.seq_len,
            "keys": shape.seq_len,
            "heads": shape.num_heads,
            "kv_heads": shape.num_heads,
            "key_size": shape.head_dim,
            "value_size": shape.head_dim,
            "dtype": shape.dtype,
        }
        spec = AttentionSpec(**sizes | KINDS[kind])
        if kernel is None or not kernel.why_not(spec, DeviceInfo.current()):
            calls[kind] = spec
    return calls


def checked(name: str, measure: Measure) -> Row:
    """The outcome of `measure`; an exception is a failure."""
    try:
        with display.phase(name):
            return Row(name, "", measure())
    except CaseFailed as error:
        return Row(name, str(error), {})
    except Exception as error:
        message = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        return Row(name, textwrap.shorten(message, 400), {})


def agreed_row(row: Row) -> Row:
    """`row`, which has failed if it has in any process; each process prints its own reason."""
    if not distributed.is_several():
        return row
    if row.failure and not distributed.is_first():
        print(f"FAILED {row.check}: {row.failure}", file=sys.stderr)
    failed = multihost_utils.process_allgather(np.array(bool(row.failure)))
    if row.failure or not failed.any():
        return row
    return row._replace(failure=f"in process {np.argmax(failed)}, see there")


def attention(
    name: str, calls: dict[str, AttentionSpec], options: DeviceOptions
) -> dict[str, float]:
    """An attention function: calls of all kinds against `reference`, then its speed."""
    results = {kind: compare(name, find_attention(name), spec) for kind, spec in calls.items()}
    failures = [f"{kind}: {each.failure}" for kind, each in results.items() if each.failure]
    if failures:
        raise CaseFailed("; ".join(failures))
    return {"kinds": len(calls), **rates(jax_attention(name, options.shape), options.repetitions)}


def products(dtype: str, options: DeviceOptions) -> dict[str, float]:
    """Products in `dtype` against float64, then the speed of a large one at default precision."""
    result = compare_products(dtype)
    if result.failure:
        raise CaseFailed(result.failure)
    size = options.product_size
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    with jax.default_matmul_precision("default"):
        multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    facts = {"flops": 2 * size**3, "peak_flops": peak_of(single(), dtype).total}
    return rates(Case(lambda: multiply(a, b), facts, jax.block_until_ready), options.repetitions)


def communication(
    name: str, axis: str, options: DeviceOptions, devices: Strategy
) -> dict[str, float]:
    """A collective along a mesh axis against numpy, then its speed."""
    case = collective(name, axis, devices.mesh, options.collective_mb * 1e6)
    rate = case.metadata["sent_bytes"] / timed(case, options.repetitions)
    numbers = {"GB/s": rate / 1e9}
    chip = TPUS.get(accelerator() or "")
    if chip:
        numbers["% of the links"] = 100 * rate / chip.link
    return numbers


def training(options: DeviceOptions, devices: Strategy) -> dict[str, float]:
    """Losses and gradients of a few steps against those with `reference`, then the speed."""
    work = replace(options.work, batch_size=options.work.batch_size * devices.num_shards)
    plain_step = jax_step(replace(work, attention_fn="reference"), devices)
    expected = [plain_step.run() for _ in range(_STEPS)]
    del plain_step  # its state, before the other one takes memory
    case = jax_step(work, devices)
    steps = [case.run() for _ in range(_STEPS)]
    differences = np.abs(np.array(steps) / np.array(expected) - 1)
    if not (differences <= _TOLERANCES[work.model.dtype]).all():
        raise CaseFailed(f"losses and gradient norms are {steps}, with reference {expected}")
    return rates(case, options.repetitions)


def decoding(options: DeviceOptions) -> dict[str, float]:
    """The speed of a step that writes a token of each text."""
    case = jax_sample(options.decoding)
    seconds = timed(case, options.repetitions)
    numbers = {
        "ms": 1e3 * seconds / options.decoding.new_tokens,
        "tokens/s": case.metadata["tokens"] / seconds,
    }
    known = ACCELERATORS.get(accelerator() or "")
    if known:
        rate = case.metadata["bytes"] / seconds
        numbers["% of the bandwidth"] = 100 * rate / known.bandwidth
    return numbers


def rates(case: Case, repetitions: int) -> dict[str, float]:
    """The time of a case, and what its metadata tells of its speed."""
    seconds = timed(case, repetitions)
    facts = case.metadata
    numbers = {"ms": 1e3 * seconds}
    if "tokens" in facts:
        numbers["tokens/s"] = facts["tokens"] / seconds
    else:
        numbers["TFLOP/s"] = facts["flops"] / seconds / 1e12
    if facts["peak_flops"]:
        numbers["% of the peak"] = 100 * facts["flops"] / seconds / facts["peak_flops"]
    return numbers


def timed(case: Case, repetitions: int) -> float:
    """The mean seconds of one of `repetitions`, after one that is not counted."""
    case.wait(case.run())
    return case.seconds(repetitions)


def accelerator() -> str | None:
    """The name of this process's devices in `ACCELERATORS`; None: unknown, or a CPU."""
    return DEVICE_KINDS.get(jax.local_devices()[0].device_kind)


def describe(rows: list[Row], devices: Strategy, options: DeviceOptions) -> str:
    """The table of `rows` in lines of 80 columns, and the reason of each failure."""
    versions = ", ".join(f"{name} {number}" for name, number in _VERSIONS.items())
    platform = " ".join(jax.devices()[0].client.platform_version.split())
    facts = f"{named(devices)}, processes: {jax.process_count()}; {versions}; {platform}"
    cells = [
        (
            row.check.rpartition(":")[2],
            "FAILED" if row.failure else "ok",
            ", ".join(f"{rounded(number)} {unit}" for unit, number in row.numbers.items()),
        )
        for row in rows
    ]
    lines = [f"FAILED {row.check}: {row.failure}" for row in rows if row.failure]
    unsupported = [name for name in options.attention_fns if not supported_calls(name, options)]
    if unsupported:
        lines.append(f"for other devices: {', '.join(unsupported)}")
    table = plain(Table(("check", "result", "measured"), cells), numbers=False)
    below = "\n".join(map(_filled, lines))
    return f"{_filled(facts)}\n\n{table}\n\n{below}".rstrip()


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def named(devices: Strategy) -> str:
    """The number and the kind of the devices."""
    kinds = sorted({device.device_kind for device in devices.mesh.devices.flat})
    return f"{devices.mesh.size} x {' and '.join(kinds)}"


def write(rows: list[Row], devices: Strategy, options: DeviceOptions) -> None:
    """Writes the outcomes so far, with the environment, to RUNS/benchmarks/NAME.json."""
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {"devices": named(devices), "processes": jax.process_count(), **environment()}
    write_json(path, {"environment": where, "checks": [row._asdict() for row in rows]})


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
