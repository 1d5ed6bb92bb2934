"""What a training will need of a machine, found out without one: the commands named `plan`."""

from experiments.planning.accelerators import ACCELERATORS, Accelerator, Machine, start_devices
from experiments.planning.command import Assembled, Subject, compile_config, plan, with_machine
from experiments.planning.compiling import Buffer, Compiled, compile_step
from experiments.planning.report import Prediction, advice, describe, predict
from experiments.planning.utilization import Peak, peak_of, rows_and_length
from experiments.planning.work import causal_flops, masked_flops, seq2seq_flops

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Assembled",
    "Buffer",
    "Compiled",
    "Machine",
    "Peak",
    "Prediction",
    "Subject",
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
