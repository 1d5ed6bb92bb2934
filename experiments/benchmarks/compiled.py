"""Programs compiled for devices that are not here: `python -m experiments.benchmarks.compiled`.

Training steps, all programs of runs, and decodings. Nothing is run. libtpu (extra `compilers`) says
the cycles of its kernels and the memory of each program, XLA's CUDA plugin (extra `cuda13`) the
memory on GPUs. Each number becomes a line of results.jsonl beside this file, which also holds those
of MaxText; `python -m experiments.results` makes the tables of the page.
"""

import gc
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments import plan
from experiments.benchmarks.report import evidence
from experiments.harness import cli, planning
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from experiments.results import FILE, Result, append
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import DEVICE_FUNCTIONS

_STEP = "language_modelling --preset gpt2_124m"
_ON_V5E = f"{_STEP} --target v5e"
_RECOMPUTED = "--training.grad_accumulation 1 --training.remat blocks"
_ONE_CHIP = f"{_ON_V5E} --data.batch_size 12 {_RECOMPUTED}"
_FOUR_CHIPS = (
    f"{_STEP} --target v5e:2x2 --strategy sharded --mesh fsdp=4 --training.gather_at use "
    f"--data.batch_size 48 {_RECOMPUTED}"
)
STEPS = {
    "jaxformer, nothing recomputed": _ON_V5E,
    "jaxformer, blocks recomputed": _ONE_CHIP,
    "jaxformer, blocks recomputed, logits in chunks": f"{_ONE_CHIP} --training.loss_chunk 2048",
    "jaxformer, fsdp=4, blocks recomputed": _FOUR_CHIPS,
    "jaxformer, fsdp=4, blocks recomputed, logits in chunks": (
        f"{_FOUR_CHIPS} --training.loss_chunk 2048"
    ),
}
"""Arguments of `plan` by the name of a training step; 12 rows of 1,024 tokens a chip and part."""

_WIDER = "--model.d_model 1536 --model.d_ff 6144 --model.num_heads 24"
_NARROWER = "--model.d_model 384 --model.d_ff 1536 --model.num_heads 6"
_ROWS = "--model.max_len {0} --data.seq_len {0} --data.batch_size {1}"
GROWTH = {
    "GPT-2: 12 layers of 768, rows of 1,024": _ON_V5E,
    "6 layers": f"{_ON_V5E} --model.num_decoder_layers 6",
    "24 layers": f"{_ON_V5E} --model.num_decoder_layers 24",
    "12 layers of 384": f"{_ON_V5E} {_NARROWER}",
    "12 layers of 1,536": f"{_ON_V5E} {_WIDER}",
    "rows of 4,096": f"{_ON_V5E} {_ROWS.format(4_096, 120)}",
    "rows of 12,288": f"{_ON_V5E} {_ROWS.format(12_288, 40)}",
}
"""Arguments of `plan` by what is changed of GPT-2's model; a step has 40 parts of 12,288 tokens."""

_SCANNED = "--model.scan_layers"
_COPIES = f"--strategy replicated {_SCANNED}"
_MESHES = "v5e:2x4 v5e:4x4 2xv5e:4x4 v6e:4x4 h100x8"
_LLAMA_ON_16 = "--mesh fsdp=16 --data.batch_size 32 --training.remat blocks"
_RUNS = (
    ("language_modelling", "gpt2_124m", "v5e", _SCANNED),
    ("language_modelling", "gpt2_124m", f"v5e:2x2 v5e:16x16 {_MESHES}", _COPIES),
    ("language_modelling", "gpt3_xl", "v5e:4x4 v6e:4x4", "--mesh fsdp=16"),
    ("language_modelling", "gpt3_xl", "2xv5e:4x4", "--mesh data=2,fsdp=16"),
    ("language_modelling", "gpt3_xl", "v5e:16x16", "--mesh data=16,fsdp=16"),
    ("language_modelling", "gpt3_xl", "h100x8", "--mesh fsdp=8"),
    ("language_modelling", "llama3_8b", "v5e:16x16", "--mesh fsdp=256"),
    ("language_modelling", "llama3_8b", "v6e:4x4", _LLAMA_ON_16),
    ("language_modelling", "bert_base", "v5e", _SCANNED),
    ("language_modelling", "bert_base", f"v5e:2x2 {_MESHES}", _COPIES),
    ("translation", "multi30k_base", "v5e", _SCANNED),
    ("translation", "multi30k_base", "v5e:2x2 v5e:2x4 h100x8", _COPIES),
    ("translation", "wmt14_big", "v5e", ""),
    ("translation", "wmt14_big", "v5e:2x2", "--strategy replicated"),
    ("translation", "wmt14_big", _MESHES, _COPIES),
)
RUNS = {
    f"{preset}, {target}": f"{experiment} --preset {preset} --target {target} {options}"
    for experiment, preset, targets, options in _RUNS
    for target in targets.split()
}
"""Arguments of `plan` by the name of a run, all of whose programs are compiled.

With `--model.scan_layers` a block is compiled once for all layers.
"""

_GPT = "language_modelling --programs decode --target v5e --preset"
_LLAMA = "language_modelling --programs decode --preset llama3_8b"
_ON_FOUR = f"{_LLAMA} --target v5e:2x2 --mesh tensor=4"
_LONG = "--sampling.max_new_tokens 2047"
_BEAMS = "--programs decode --target v5e --decode.texts 64 --decode.prompt_length 64"
_TO_64 = f"{_BEAMS} --search.max_new_tokens 64"
DECODINGS = {
    "gpt2_124m, 1 text of 1,023 tokens": f"{_GPT} gpt2_124m --sampling.max_new_tokens 1023",
    "gpt2_124m, 32 texts of 1,023": (
        f"{_GPT} gpt2_124m --sampling.max_new_tokens 1023 --decode.texts 32"
    ),
    "gpt3_xl, 16 texts of 2,047": f"{_GPT} gpt3_xl --mesh data=1 {_LONG} --decode.texts 16",
    "llama3_8b, tensor=4, 1 text of 2,047": f"{_ON_FOUR} {_LONG}",
    "llama3_8b, tensor=4, 16 texts of 2,047": f"{_ON_FOUR} {_LONG} --decode.texts 16",
    "llama3_8b, int8, tensor=4, 1 text of 2,047": f"{_ON_FOUR} {_LONG} --decode.int8",
    "llama3_8b, tensor=8, 128 texts of 2,047": (
        f"{_LLAMA} --target v5e:2x4 --mesh tensor=8 {_LONG} --decode.texts 128"
    ),
    "llama3_8b, tensor=4, a prompt of 32,768": (
        f"{_ON_FOUR} --decode.prompt_length 32768 --sampling.max_new_tokens 128 "
        "--completion.prefill_chunk 16384 --model.max_len 32896"
    ),
    "multi30k_base, 64 sentences of 64, 4 beams": f"translation --preset multi30k_base {_TO_64}",
    "wmt14_base, 64 sentences of 64, 4 beams": f"translation --preset wmt14_base {_TO_64}",
    "wmt14_big, 64 sentences of 64, 4 beams": f"translation --preset wmt14_big {_TO_64}",
}
"""Arguments of `plan` by the name of a decoding."""

TABLES = {
    "compiled": STEPS,
    "compiled_growth": GROWTH,
    "compiled_runs": RUNS,
    "compiled_decoding": DECODINGS,
}
PROGRAMS = STEPS | GROWTH | RUNS | DECODINGS
_COLUMNS = {"sampling": "decoding", "beam": "decoding"} | {
    name: name for name in ("step", "validation", "averaging")
}


@dataclass(frozen=True)
class CompiledOptions:
    """The programs to compile."""

    only: tuple[str, ...] = ()
    """Names of rows, as the tables have them; none: all."""
    results: Path = Path(__file__).with_name(FILE)
    """File to which a line for each number is added, in place of an earlier one."""

    def __post_init__(self):
        for name in set(self.only) - PROGRAMS.keys():
            raise ConfigError(f"only has {name!r}: give one of {'; '.join(PROGRAMS)}")


def main(options: CompiledOptions) -> None:
    """Compiles the programs one after the other, prints the numbers and adds them to the file."""
    for name in options.only or PROGRAMS:
        print(f"{name}: python -m experiments.plan {' '.join(arguments_of(name))}", flush=True)
        measured = measure(name)
        append(options.results, measured)
        numbers = ", ".join(f"{each.metric} {each.score:,}" for each in measured)
        print(f"  {numbers}; compiled, not run", flush=True)
        gc.collect()  # a program takes gigabytes


def arguments_of(name: str) -> list[str]:
    """The arguments of `plan` that compile the program of that name."""
    words = PROGRAMS[name].split()
    return [*words, "--compiler", "cuda" if "h100x8" in words else "tpu"]


def config_of(name: str) -> Any:
    """The configuration of the program of that name."""
    experiment, *words = arguments_of(name)
    return cli.parse(plan.presets_of(experiment), ["--experiment", experiment, *words])


def measure(name: str) -> list[Result]:
    """The numbers of the program of that name; on TPUs the time and speed of its step too."""
    config = config_of(name)
    training, target = plan.training_of(config.experiment), planning.parse_target(config.target)
    count = target.devices_of(1, config.strategy)
    devices = planning.devices(target, count)
    if name in DECODINGS:
        decoding = planning.compile_decoding(
            config, training, config.decode, target.accelerator, devices
        )
        numbers, seconds = _of_decoding(decoding), decoding.seconds
    else:
        step = planning.compile_step(config, training, devices)
        numbers = _of_run(step, target) if name in RUNS else _of_step(step, config)
        seconds = step.seconds
        if target.accelerator in TPUS:
            numbers |= _speed(step, config, training.flops(config), target.accelerator, count)
    compiler = "libtpu" if target.accelerator in TPUS else "jax-cuda13-plugin"
    return evidence(
        next(table for table, programs in TABLES.items() if name in programs),
        name,
        numbers,
        f"{count} x {target.accelerator}, compiled, not run",
        command=f"python -m experiments.plan {' '.join(arguments_of(name))}",
        versions={each: metadata.version(each) for each in ("jax", compiler)},
        seconds=round(seconds),
    )


def _speed(
    step: planning.CompiledStep, config: Any, flops: int, accelerator: str, count: int
) -> dict[str, float]:
    """The time of a step of `flops` on `count` TPUs, and its share of their peak."""
    specs = [selection.spec for _, selection in step.attention]
    time = planning.step_time(step.program, accelerator, specs, step.schedules)
    if time.uncounted:
        raise ValueError(f"no schedule of {time.uncounted}: the time would be too short")
    seconds = time.total
    peak = count * getattr(ACCELERATORS[accelerator], config.model.dtype)
    return {"step, s": round(seconds, 3), "MFU, %": round(100 * flops / seconds / peak, 1)}


def _of_step(step: planning.CompiledStep, config: Any) -> dict[str, float]:
    """The cycles of a part, and the memory."""
    specs = [selection.spec for _, selection in step.attention]
    cycles = planning.step_time(step.program, "v5e", specs, step.schedules).cycles
    return {
        "M cycles": round(cycles / config.training.grad_accumulation / 1e6, 1),
        "memory, GiB": round(step.memory.total / 2**30, 2),
        "temporary, GiB": round(step.memory.temporary / 2**30, 2),
    }


def _of_run(step: planning.CompiledStep, target: planning.Target) -> dict[str, float]:
    """The memory of each program of a run, and the share of flash attention in its calls."""
    programs = [("step", step.memory.total), *((each.name, each.memory) for each in step.others)]
    calls = [*step.attention, *(call for each in step.others[:1] for call in each.attention)]
    flash = sum(name in DEVICE_FUNCTIONS for name, _ in calls)
    return {
        **{f"{_COLUMNS[name.split()[0]]}, GiB": round(n / 2**30, 2) for name, n in programs},
        "of, GiB": round(ACCELERATORS[target.accelerator].usable_memory / 2**30, 2),
        "flash, %": round(100 * flash / len(calls), 1),
    }


def _of_decoding(decoding: planning.CompiledDecoding) -> dict[str, float]:
    """The time, limit and memory of a decoding step, and the time before the first."""
    assert decoding.step and decoding.prompt  # TPUs' compiler knows cycles
    return {
        "by cycles, ms": round(decoding.step.total * 1e3, 2),
        "limit, ms": round(decoding.limit * 1e3, 2),
        "of the limit": round(max(decoding.step.total / decoding.limit, 1.0), 2),
        "prompt, ms": round(decoding.prompt.total * 1e3, 1),
        "memory, GiB": round(decoding.memory / 2**30, 2),
        "temporary, GiB": round(decoding.temporary / 2**30, 2),
    }


if __name__ == "__main__":
    cli.start(main, {"default": CompiledOptions()}, __doc__)
