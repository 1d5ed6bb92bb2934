"""Planning: memory and time of a training step, compiled for devices that need not be here."""

from experiments.harness.planning.compiling import (
    CompiledStep,
    Decoding,
    DecodingProgram,
    PlannedTraining,
    StepMemory,
    compile_step,
)
from experiments.harness.planning.decoding import (
    CompiledDecoding,
    compile_decoding,
    describe_decoding,
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
    "CompiledDecoding",
    "CompiledStep",
    "Compiler",
    "Decoding",
    "DecodingProgram",
    "PlannedTraining",
    "StepMemory",
    "Target",
    "advice",
    "check_compiler",
    "compile_decoding",
    "compile_step",
    "describe",
    "describe_decoding",
    "devices",
    "parse_target",
    "start_devices",
    "step_time",
]
