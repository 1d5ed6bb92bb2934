"""The commands `plan`: memory and time of a training step, computed without the machine."""

from experiments.harness.planning.accelerators import (
    ACCELERATORS,
    Accelerator,
    Machine,
    start_devices,
)
from experiments.harness.planning.command import (
    Assembled,
    PlannedTraining,
    compile_config,
    plan,
    with_machine,
)
from experiments.harness.planning.compiling import Buffer, Compiled, compile_step
from experiments.harness.planning.report import Prediction, advice, describe, predict
from experiments.harness.planning.utilization import Peak, peak_of, rows_and_length
from experiments.harness.planning.work import causal_flops, masked_flops, seq2seq_flops

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Assembled",
    "Buffer",
    "Compiled",
    "Machine",
    "Peak",
    "Prediction",
    "PlannedTraining",
    "advice",
    "causal_flops",
    "compile_config",
    "compile_step",
    "describe",
    "masked_flops",
    "peak_of",
    "plan",
    "predict",
    "rows_and_length",
    "seq2seq_flops",
    "start_devices",
    "with_machine",
]
