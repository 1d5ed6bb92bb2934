"""Planning: memory and time of a training step, compiled for devices that need not be here."""

from experiments.harness.planning.compiling import (
    CompiledStep,
    PlannedTraining,
    StepMemory,
    compile_step,
)
from experiments.harness.planning.report import ASSUMPTIONS, advice, describe
from experiments.harness.planning.step_time import step_time
from experiments.harness.planning.targets import (
    Compiler,
    Target,
    check_compiler,
    devices,
    parse_target,
    start_devices,
)

__all__ = [
    "ASSUMPTIONS",
    "CompiledStep",
    "Compiler",
    "PlannedTraining",
    "StepMemory",
    "Target",
    "advice",
    "check_compiler",
    "compile_step",
    "describe",
    "devices",
    "parse_target",
    "start_devices",
    "step_time",
]
