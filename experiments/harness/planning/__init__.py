"""Planning: the programs of a run, compiled for devices that need not be here."""

from experiments.harness.planning.compiling import PlannedTraining, plan_run
from experiments.harness.planning.report import report
from experiments.harness.planning.schedules import ask_for_schedules
from experiments.harness.planning.step_time import step_time
from experiments.harness.planning.targets import (
    Compiler,
    check_compiler,
    devices,
    parse_target,
    start_devices,
)

__all__ = [
    "Compiler",
    "PlannedTraining",
    "ask_for_schedules",
    "check_compiler",
    "devices",
    "parse_target",
    "plan_run",
    "report",
    "start_devices",
    "step_time",
]
