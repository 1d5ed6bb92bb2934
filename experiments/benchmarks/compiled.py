"""Training steps compiled for TPUs of the kind v5e: `python -m experiments.benchmarks.compiled`.

Nothing is run, and no TPU is needed: libtpu (extra `compilers`) says the cycles of its kernels and
the memory. Each number becomes a line of results.jsonl beside this file, which also holds those of
MaxText; `python -m experiments.results` makes the table of the page.
"""

import gc
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments import plan
from experiments.benchmarks.report import evidence
from experiments.harness import cli, planning
from experiments.harness.training.utilization import ACCELERATORS
from experiments.language_modelling.plan import TRAINING
from experiments.results import FILE, Result, append
from jaxformer.errors import ConfigError

_RECOMPUTED = "--training.grad_accumulation 1 --training.remat blocks"
_ONE_CHIP = f"--target v5e --data.batch_size 12 {_RECOMPUTED}"
_FOUR_CHIPS = (
    "--target v5e:2x2 --strategy sharded --mesh fsdp=4 --training.gather_at use "
    f"--data.batch_size 48 {_RECOMPUTED}"
)
PROGRAMS = {
    "nothing recomputed": "--target v5e",
    "blocks recomputed": _ONE_CHIP,
    "blocks recomputed, logits in chunks": f"{_ONE_CHIP} --training.loss_chunk 2048",
    "fsdp=4, blocks recomputed": _FOUR_CHIPS,
    "fsdp=4, blocks recomputed, logits in chunks": f"{_FOUR_CHIPS} --training.loss_chunk 2048",
}
"""Options of `plan`, by the name of the program; 12 rows of 1,024 tokens a chip and part."""

LARGE = {"gpt3_xl": "--target v5e:4x4", "llama3_8b": "--target v5e:16x16"}
"""Options of `plan`, by the preset, for those that need many chips."""

TABLE = "compiled"


@dataclass(frozen=True)
class CompiledOptions:
    """The programs to compile."""

    only: tuple[str, ...] = ()
    """Names of programs, as the table has them; none: all."""
    results: Path = Path(__file__).with_name(FILE)
    """File to which a line for each number is added, in place of an earlier one."""

    def __post_init__(self):
        for name in set(self.only) - {*PROGRAMS, *LARGE}:
            raise ConfigError(f"only has {name!r}: give one of {', '.join((*PROGRAMS, *LARGE))}")


def main(options: CompiledOptions) -> None:
    """Compiles the programs one after the other, prints the numbers and adds them to the file."""
    for name in options.only or (*PROGRAMS, *LARGE):
        measured = measure(name)
        append(options.results, measured)
        numbers = ", ".join(f"{each.metric} {each.score:,}" for each in measured)
        print(f"{name}: {numbers}; compiled, not run", flush=True)
        gc.collect()  # a program takes gigabytes


def config_of(name: str) -> Any:
    """The configuration of the program `name`: options of `plan` as the table has them."""
    return cli.parse(plan.presets_of("language_modelling"), arguments_of(name))


def arguments_of(name: str) -> list[str]:
    """The arguments of `plan language_modelling` that compile the program `name`."""
    preset, options = (name, LARGE[name]) if name in LARGE else ("gpt2_124m", PROGRAMS[name])
    return ["--preset", preset, "--compiler", "tpu", *options.split()]


def measure(name: str) -> list[Result]:
    """The MFU, the cycles of a part and the memory of the step of that name."""
    config = config_of(name)
    target = planning.parse_target(config.target)
    count = target.count or 1
    step = planning.compile_step(config, TRAINING, planning.devices(target, count))
    specs = [selection.spec for _, selection in step.attention]
    time = planning.step_time(step.program, target.accelerator, specs)
    peak = count * ACCELERATORS[target.accelerator].bfloat16
    cycles = time.cycles / config.training.grad_accumulation
    numbers = {
        "MFU, %": round(100 * TRAINING.flops(config) / time.total / peak, 1),
        "M cycles": round(cycles / 1e6, 1),
        "memory, GiB": round(step.memory.total / 2**30, 2),
        "temporary, GiB": round(step.memory.temporary / 2**30, 2),
    }
    return evidence(
        f"{TABLE}_large" if name in LARGE else TABLE,
        f"jaxformer, {name}",
        numbers,
        f"{count} x {target.accelerator}, compiled, not run",
        command=f"python -m experiments.plan language_modelling {' '.join(arguments_of(name))}",
        versions={each: metadata.version(each) for each in ("jax", "libtpu")},
        seconds=round(step.seconds),
    )


if __name__ == "__main__":
    cli.start(main, {"default": CompiledOptions()}, __doc__)
