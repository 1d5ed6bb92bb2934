"""The start of a training: devices of the model, parts of a batch, first state and step."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from experiments.harness.cli import display
from experiments.harness.training.fewest_parts import (
    MEMORY_SHARE,
    fewest_parts,
    gpu_memory,
    step_memory,
)
from experiments.harness.training.initialization import take_over
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.task import Task
from jaxformer.distributed import agreed
from jaxformer.text.data import all_rows
from jaxformer.training.train_step import TrainState


def start(run: OpenRun, task: Task) -> tuple[OpenRun, TrainState, Any]:
    """`run` on the devices of its model, its first state, and its step.

    The state has what the run takes over from the run or the folder that it starts from.
    """
    run = replace(run, devices=run.devices.for_model(task.model))
    batch = task.batches.batch(0, all_rows)
    run = with_fewest_parts(run, task, batch)
    init, step = task.make_step(run.config, task.model, batch, run.devices)
    with display.phase("creating the model"):
        state = run.devices.init(init)
    return run, take_over(run, task, state), step


def with_fewest_parts(run: OpenRun, task: Task, batch: Any) -> OpenRun:
    """`run` with the fewest parts of `batch` with which its `task` fits a GPU.

    Nothing changes where its configuration gives them or takes the batch whole, and on other
    devices. Only compiled programs say how much memory a step needs: two are compiled.
    """
    devices, training = run.devices, run.config.training
    most, limit = training.parts_on(devices), gpu_memory(devices)
    if training.grad_accumulation or most == 1 or limit is None:
        return run
    memory_of = partial(step_memory, run.config, task.make_step, task.model, batch, devices)
    rows = len(jax.tree.leaves(batch)[0]) // devices.num_shards
    with display.phase("finding the parts of a batch that fit"):
        parts = agreed(fewest_parts(memory_of, MEMORY_SHARE * limit, rows, most))
    display.say(f"{parts} parts of {rows // parts} rows on each device")
    found = replace(training, grad_accumulation=parts * devices.num_shards)
    return run.settled(training=found)
