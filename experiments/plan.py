"""Memory and time of a training: `python -m experiments.plan EXPERIMENT --preset NAME`.

EXPERIMENT is translation, language_modelling, or the module of your own train.py. Compiles the
step, validation and decoding without text, weights or devices. The options are those of its train,
and --target h100x8 or v5e:4x4. --compiler cpu estimates; tpu and cuda are the targets' own.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

from experiments import registry
from experiments.harness import cli, planning
from experiments.harness.planning import Compiler
from jaxformer.distributed import parse_mesh


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The devices that a run is planned for, and the compiler."""

    experiment: str = ""
    """translation, language_modelling, or the module of your own; without --experiment."""
    target: str = "h100"
    """The devices: h100, h100x8, v5e (one chip), v5e:4x4, 2xv5e:4x4 (slices); without a number as
    many as the mesh."""
    compiler: Compiler = "cpu"
    """The compiler: cpu estimates in seconds; tpu and cuda, the targets' own, take minutes."""

    def __post_init__(self):
        # that of the experiment's configuration, which help without an experiment does not have
        getattr(super(), "__post_init__", lambda: None)()
        planning.check_compiler(self.compiler, planning.parse_target(self.target))


def presets_of(experiment: str) -> dict[str, Any]:
    """The presets of an experiment with `PlanOptions` as further fields."""
    registry.planned(experiment)
    presets = registry.find(experiment).PRESETS
    base = type(next(iter(presets.values())))
    kind = make_dataclass(f"Planned{base.__name__}", (), bases=(PlanOptions, base), frozen=True)
    return cli.with_options(presets, kind)


def main(config: Any) -> None:
    """Prints memory and time of a run of `config` on its target, and what to change for its memory.

    `config` has the fields of `PlanOptions` besides those of the experiment. Raises `ConfigError`
    for a mesh that does not fit the devices, the batch or the parameters, and `MissingExtra`
    without the target's compiler.
    """
    training = registry.planned(config.experiment)
    config = training.prepare(config)
    target, is_estimate = planning.parse_target(config.target), config.compiler == "cpu"
    count = target.devices_of(math.prod(parse_mesh(config.mesh).values()), config.strategy)
    if is_estimate:
        planning.start_devices(count)
    devices = None if is_estimate else planning.devices(target, count)
    for paragraph in planning.report(config, training, target.accelerator, count, devices):
        print(paragraph, flush=True)


def _presets(arguments: Sequence[str]) -> dict[str, Any]:
    """The presets of the experiment that `arguments` name; none: of no experiment."""
    first = registry.named_in(arguments)
    return {"default": PlanOptions()} if first in ("-h", "--help") else presets_of(first)


if __name__ == "__main__":
    cli.start(main, lambda: _presets(sys.argv[1:]), __doc__, positional="experiment")
