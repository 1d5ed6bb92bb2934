"""Memory and time of a training: `python -m experiments.plan EXPERIMENT --preset NAME`.

EXPERIMENT is translation, language_modelling, or the module of your own train.py. Compiles the
step, validation and decoding without text, weights or devices. It has the options of its train,
and --target h100x8 or v5e:4x4. --compiler cpu estimates; tpu and cuda are the targets' own.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from experiments import registry
from experiments.harness import cli, planning
from experiments.harness.planning import Compiler
from jaxformer.config import Checked
from jaxformer.distributed import parse_mesh


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Checked):
    """The devices that a run is planned for, and the compiler."""

    target: str = "h100"
    """The devices: h100, h100x8, v5e (one chip), v5e:4x4, 2xv5e:4x4 (slices); without a number as
    many as the mesh."""
    compiler: Compiler = "cpu"
    """The compiler: cpu estimates in seconds; tpu and cuda, the targets' own, take minutes."""

    def __post_init__(self):
        super().__post_init__()
        planning.check_compiler(self.compiler, planning.parse_target(self.target))


def main(args: Sequence[str]) -> None:
    """Prints memory and time of a run on its target, and what to change for its memory.

    Raises `ConfigError` for a mesh that does not fit the devices, the batch or the parameters, and
    `MissingExtra` without the target's compiler.
    """
    command = registry.parse(args, PlanOptions(), __doc__)
    training = registry.planned(command.experiment.__name__)
    config = training.prepare(command.config)
    target = planning.parse_target(command.options.target)
    compiler = command.options.compiler
    count = target.devices_of(math.prod(parse_mesh(config.mesh).values()), config.strategy)
    if compiler == "cpu":
        planning.start_devices(count)
    if compiler == "tpu":
        planning.ask_for_schedules()
    devices = None if compiler == "cpu" else planning.devices(target, count)
    name = target.accelerator
    for paragraph in planning.report(config, training, name, count, compiler, devices):
        print(paragraph, flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:])))
