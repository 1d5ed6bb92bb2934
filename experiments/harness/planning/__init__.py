"""The commands `plan`: memory and time of a training step, computed without the machine."""

from experiments.harness.planning.accelerators import ACCELERATORS, Accelerator, start_devices
from experiments.harness.planning.command import (
    PlannedTraining,
    PlanOptions,
    compile_config,
    plan,
    with_options,
)
from experiments.harness.planning.compiling import Buffer, StepMemory
from experiments.harness.planning.report import Prediction, advice, describe, predict
from experiments.harness.training.flops import causal_flops, masked_flops, seq2seq_flops
from experiments.harness.training.utilization import Peak, peak_of, rows_and_length

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Buffer",
    "Peak",
    "PlanOptions",
    "PlannedTraining",
    "Prediction",
    "StepMemory",
    "advice",
    "causal_flops",
    "compile_config",
    "describe",
    "masked_flops",
    "peak_of",
    "plan",
    "predict",
    "rows_and_length",
    "seq2seq_flops",
    "start_devices",
    "with_options",
]
