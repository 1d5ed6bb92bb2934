"""The first state of a run with what it takes over: other weights, or the state of another run."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.tree_util import Partial

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parameters import with_params
from experiments.harness.training.parent import (
    load_start,
    parent_of,
    parent_record,
    refuse_parent,
)
from experiments.harness.training.task import Task
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.stacked_blocks import stack_blocks, unstack_blocks
from jaxformer.training.lora import without_adapters
from jaxformer.training.parameters import flatten, map_with_path
from jaxformer.training.train_step import TrainState


def take_over(run: OpenRun, task: Task, state: TrainState) -> TrainState:
    """`state`, the first one of `run`, with what it takes over from where it starts.

    A run with a checkpoint of its own goes on from that instead. Raises `ConfigError` for
    parameters of other shapes, and as `_continued` does.
    """
    config = run.config
    source = config.continue_from or config.init_from
    if not source or run.checkpoints.steps():
        return state
    with display.phase(f"reading {source}"):
        if config.continue_from:
            state, steps = _continued(config, state, task.batches.fingerprint)
        elif task.read_start is not None:
            state, steps = with_part(config, state, task.read_start(run), run.devices), []
        else:
            state, steps = _with_weights_of_start(config, state, run.devices)
    if steps:
        display.say(f"step {', '.join(map(str, steps))} of {source}")
    if distributed.is_first():
        parent = parent_of(config)
        folder = source if parent is None else str(parent.folder)
        option = "continue_from" if config.continue_from else "init_from"
        parent_record(run.folder).write({"how": option, "run": folder, "steps": steps})
    return state


def _with_weights_of_start(
    config: ExperimentConfig, state: TrainState, devices: Strategy
) -> tuple[TrainState, list[int]]:
    """`state` with the weights of the run or folder that init_from names, and their steps."""
    parent = parent_of(config)
    loaded = load_start(config, devices)  # each device reads only its parts
    is_stacked = loaded.model.config.scan_layers
    state = with_weights(config, state, loaded.params, devices, is_stacked=is_stacked)
    return state, [] if parent is None else parent.weights.steps


def with_weights(
    config: ExperimentConfig, state: TrainState, params: Any, devices: Strategy, *, is_stacked: bool
) -> TrainState:
    """`state` with all `params` of another model, whose blocks are stacked or not.

    With a block of the user's own, parameters that they lack keep their first values. Raises
    `ConfigError` for parameters of other shapes.
    """
    arrange = _arrangement(config, is_stacked=is_stacked)
    loaded = flatten(jax.eval_shape(arrange, params))
    first = flatten(without_adapters(state.params))
    lacking: dict[str, Any] = {}
    if config.training.block:
        lacking = {path: leaf for path, leaf in first.items() if path not in loaded}
    check_shapes(config.init_from, loaded | lacking, first)
    return _merged(config, state, params, lacking, arrange, devices)


def with_part(
    config: ExperimentConfig, state: TrainState, params: Any, devices: Strategy
) -> TrainState:
    """`state` with each of `params` that its model has; the rest of the model starts anew.

    None are random parameters: `state` as it is. Raises `ConfigError` for parameters of other
    shapes.
    """
    if params is None:
        return state
    first = flatten(without_adapters(state.params))
    loaded = {path: leaf for path, leaf in flatten(params).items() if path in first}
    lacking = {path: leaf for path, leaf in first.items() if path not in loaded}
    check_shapes(config.init_from, loaded | lacking, first)
    return _merged(config, state, params, lacking, lambda params: params, devices)


def _arrangement(config: ExperimentConfig, *, is_stacked: bool) -> Callable[[Any], Any]:
    """The function that gives parameters, of stacked blocks or not, the form of the run's model."""
    if is_stacked == config.model.scan_layers:
        return lambda params: params
    if is_stacked:
        return unstack_blocks
    return stack_blocks


def _merged(
    config: ExperimentConfig,
    state: TrainState,
    params: Any,
    lacking: dict[str, Any],
    arrange: Callable[[Any], Any],
    devices: Strategy,
) -> TrainState:
    """`state` with arrange(params), and with `lacking`, the first values of what they lack."""
    if lacking:
        names = ", ".join(lacking)
        display.say(f"not in {config.init_from}, so they start anew: {names}")
    first = flatten(without_adapters(state.params))

    def merged(params: Any, lacking: dict[str, Any]) -> Any:
        known = flatten(arrange(params)) | lacking
        # copies, because a step donates its state's buffers
        copies = {path: jnp.array(known[path], dtype=x.dtype) for path, x in first.items()}
        return unflatten_dict(copies, sep="/")

    make = Partial(merged, params, lacking)
    return with_params(state, config.training, lambda: devices.init(make))


def check_shapes(source: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `ConfigError`, naming the first, for parameters of a run that have other shapes."""
    shapes = {path: leaf.shape for path, leaf in given.items()}
    needed = {path: leaf.shape for path, leaf in wanted.items()}
    wrong = sorted(path for path in shapes | needed if shapes.get(path) != needed.get(path))
    if wrong:
        path = wrong[0]
        raise ConfigError(
            f"{source} does not fit this model: {path} is {shapes.get(path, 'absent')} there, but "
            f"{needed.get(path, 'absent')} here ({len(wrong)} parameters differ): use its sizes"
        )


def _continued(
    config: ExperimentConfig, state: TrainState, fingerprint: str
) -> tuple[TrainState, list[int]]:
    """The state of the parent, with the peak learning rate of `state`, and its step.

    Raises `ConfigError` where the parent was trained on other batches, has done all steps of
    `config`, or is asked for a mean of checkpoints, `CheckpointError` for another optimizer.
    """
    parent = parent_of(config)
    if parent is None:
        refuse_parent("continue_from", config.continue_from)
    if parent.checkpoint not in ("final", "last"):
        raise ConfigError(
            f"continue_from={config.continue_from!r} asks for weights without an optimizer state: "
            "give RUN or RUN@STEP, or use --init_from"
        )
    checkpoints = Checkpoints(parent.folder / "checkpoints")
    restored, metadata = checkpoints.restore(state, parent.step)
    step = int(restored.step)
    if metadata["data"] != fingerprint:
        raise ConfigError(
            f"{parent.folder} was trained on other batches than these: continue_from goes on with "
            "the same text, seed and batch settings; for others use --init_from"
        )
    if step >= config.optimizer.total_steps:
        raise ConfigError(
            f"{parent.folder} is at step {step} already, but optimizer.total_steps="
            f"{config.optimizer.total_steps}: give more steps"
        )
    fresh = flatten(state.opt_state)

    def with_rate(path: str, leaf: Any) -> Any:
        return fresh[path] if path.endswith("learning_rate") else leaf

    return restored.replace(opt_state=map_with_path(with_rate, restored.opt_state)), [step]
