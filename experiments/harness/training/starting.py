"""The start of a training: devices of the model, parts of a batch, first state and step."""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax

from experiments.harness.cli import display
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.fewest_parts import (
    MEMORY_SHARE,
    fewest_parts,
    gpu_memory,
    step_memory,
)
from experiments.harness.training.initialization import first_state
from experiments.harness.training.open_run import OpenRun, with_parts
from experiments.harness.training.task import Task
from jaxformer.distributed import agreed
from jaxformer.errors import ConfigError
from jaxformer.text.data import all_rows
from jaxformer.training.train_step import TrainState
from jaxformer.training.whole_batch import check_loss

C = TypeVar("C", bound=ExperimentConfig)


def start(run: OpenRun[C], task: Task) -> tuple[OpenRun[C], Any, TrainState]:
    """`run` with its devices and its configuration settled, its step, and its first state.

    The state has what the run takes over from the run or the folder that it starts from.
    """
    run = replace(run, devices=run.devices.for_model(task.model))
    batch = task.batches.batch(0, all_rows)
    run = with_fewest_parts(run, task, batch)
    init, step = task.make_step(run.config, task.model, batch, run.devices)
    state = first_state(run, task, init)
    check_own_loss(run, task, step, state.params, batch)
    return run, step, state


def check_own_loss(run: OpenRun[C], task: Task, step: Any, params: Any, batch: Any) -> None:
    """Raises `ConfigError` for a loss of one's own that changes where a batch is divided.

    It is computed for four rows of `batch`. Losses of the library are sums over rows.
    """
    training, devices = run.config.training, run.devices
    parts = training.parts_on(devices)
    loss = getattr(step, "loss", None)  # a step of one's own may have none
    if not training.loss or loss is None or parts == devices.num_shards == 1:
        return
    with devices.active():
        is_sum = check_loss(loss, task.model, batch, params=params)
    if parts > 1 and not is_sum:
        raise ConfigError(
            f"grad_accumulation={training.grad_accumulation}, but the loss {training.loss} depends "
            "on all rows of a batch together: give --training.grad_accumulation 1"
        )


def with_fewest_parts(run: OpenRun[C], task: Task, batch: Any) -> OpenRun[C]:
    """`run` with the fewest parts of `batch` with which its `task` fits a GPU.

    Nothing changes where its configuration gives them or takes the batch whole, and on other
    devices; a resumed run keeps those that it has found. Only compiled programs say how much memory
    a step needs: two are compiled.
    """
    if run.found_parts is not None:
        return replace(run, config=with_parts(run.config, run.found_parts))
    devices, training = run.devices, run.config.training
    most, limit = training.parts_on(devices), gpu_memory(devices)
    if training.grad_accumulation or most == 1 or limit is None:
        return run
    memory_of = partial(step_memory, run.config, task.make_step, task.model, batch, devices)
    rows = len(jax.tree.leaves(batch)[0]) // devices.num_shards
    with display.phase("finding the parts of a batch that fit"):
        parts = int(agreed(fewest_parts(memory_of, MEMORY_SHARE * limit, rows, most)))
    display.say(f"{parts} parts of {rows // parts} rows on each device")
    config = with_parts(run.config, parts * devices.num_shards)
    run.record_settings(training=config.training)
    return replace(run, config=config)
