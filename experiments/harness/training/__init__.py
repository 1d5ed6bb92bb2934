"""Training of a run: `open_run` opens it, a `Task` says what it learns, `fit` trains it.

`training_config` has the settings that all experiments share, `named_values` the values of your own
that they may name, `build` makes what they name, `initialization` has what a run takes over from
another one, `progress` what is logged and shown, `chips` and `flops` the work of a step.
"""

from experiments.harness.training.build import build_batches, build_loss, build_model
from experiments.harness.training.final_weights import choose_weights
from experiments.harness.training.fit import fit
from experiments.harness.training.gradient_step import gradient_step
from experiments.harness.training.metric_inputs import MetricInputs, user_metrics
from experiments.harness.training.named_values import with_values
from experiments.harness.training.open_run import OpenRun, open_run
from experiments.harness.training.run_summary import describe_folder
from experiments.harness.training.samples import sample_lines
from experiments.harness.training.starting import start
from experiments.harness.training.task import Cost, EvaluationResult, InitAndStep, MakeStep, Task

__all__ = [
    "Cost",
    "EvaluationResult",
    "InitAndStep",
    "MakeStep",
    "MetricInputs",
    "OpenRun",
    "Task",
    "build_batches",
    "build_loss",
    "build_model",
    "choose_weights",
    "describe_folder",
    "fit",
    "gradient_step",
    "open_run",
    "sample_lines",
    "start",
    "user_metrics",
    "with_values",
]
