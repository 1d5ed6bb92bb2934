"""Planning: memory and time of a training step, compiled for devices that need not be here."""

from experiments.harness.planning.compiling import PlannedTraining, StepMemory, compile_step
from experiments.harness.planning.report import ASSUMPTIONS, advice, describe, describe_shortage
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
    "Compiler",
    "PlannedTraining",
    "StepMemory",
    "Target",
    "advice",
    "check_compiler",
    "compile_step",
    "describe",
    "describe_shortage",
    "devices",
    "parse_target",
    "start_devices",
    "step_time",
]
