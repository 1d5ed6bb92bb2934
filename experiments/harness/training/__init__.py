"""Training of a run: `open_run` opens it, a `Task` says what it learns, `fit` trains it.

`build` makes the parts that a run's settings name, `training_config` has the settings that all
experiments share, `initialization` what a run takes over from another one, `progress` what is
logged and shown, `utilization` the work of a step.
"""

from experiments.harness.training.build import (
    MetricInputs,
    build_batches,
    build_loss,
    build_model,
    user_metrics,
    with_values,
)
from experiments.harness.training.fit import fit
from experiments.harness.training.initialization import start
from experiments.harness.training.open_run import OpenRun, choose_weights, describe_folder, open_run
from experiments.harness.training.task import (
    Cost,
    EvaluationResult,
    InitAndStep,
    Task,
    init_and_step,
    sample_lines,
)

__all__ = [
    "Cost",
    "EvaluationResult",
    "InitAndStep",
    "MetricInputs",
    "OpenRun",
    "Task",
    "build_batches",
    "build_loss",
    "build_model",
    "choose_weights",
    "describe_folder",
    "fit",
    "init_and_step",
    "open_run",
    "sample_lines",
    "start",
    "user_metrics",
    "with_values",
]
