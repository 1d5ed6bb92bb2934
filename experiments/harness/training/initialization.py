"""The first state of a run: drawn, with weights of another run or a folder, or a run's state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.tree_util import Partial

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parent import (
    load_start,
    parent_of,
    parent_record,
    refuse_parent,
)
from experiments.harness.training.task import Task
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import Strategy, check_fits
from jaxformer.errors import ConfigError
from jaxformer.nn.stacked_blocks import stack_blocks, unstack_blocks
from jaxformer.training.lora import replace_base, without_adapters
from jaxformer.training.parameters import flatten, map_with_path
from jaxformer.training.train_step import TrainState


def first_state(run: OpenRun, task: Task, init: Callable[[], TrainState]) -> TrainState:
    """The first state of `run`, on its devices: init() with what it takes over.

    Only what the run or folder that it starts from lacks is drawn. A run with a checkpoint of its
    own goes on from that, so of its state only the shapes are given. Raises `ConfigError` for
    parameters of other shapes, and as `_continued` does.
    """
    config = run.config
    if run.checkpoints.steps():
        return _abstract(run.devices, init)
    if config.continue_from:
        with display.phase(f"reading {config.continue_from}"):
            rates = jax.jit(_learning_rates)(Partial(init))
            abstract = _abstract(run.devices, init)
            state, steps = _continued(config, abstract, rates, task.batches.fingerprint)
        _record_parent(run, "continue_from", config.continue_from, steps)
        return state
    if config.init_from:
        with display.phase(f"reading {config.init_from}"):
            start = _read_start(run, task)
        with display.phase("creating the model"):
            state = run.devices.init(Partial(_with_start, Partial(init)), start)
        _say_differences(start, state.params)
        _record_parent(run, "init_from", config.init_from, start.steps)
        return state
    with display.phase("creating the model"):
        return run.devices.init(init)


def _record_parent(run: OpenRun, option: str, source: str, steps: tuple[int, ...]) -> None:
    """Writes what `run` has taken from `source`, which `option` names, and says its `steps`."""
    if steps:
        display.say(f"step {', '.join(map(str, steps))} of {source}")
    if distributed.is_first():
        parent = parent_of(run.config)
        folder = source if parent is None else str(parent.folder)
        parent_record(run.folder).write({"how": option, "run": folder, "steps": steps})


def _abstract(devices: Strategy, init: Callable[[], TrainState]) -> TrainState:
    """The shapes and shardings of init(); `ConfigError` for what no device has the memory for."""
    abstract = devices.abstract(init)
    check_fits(abstract)
    return abstract


def _learning_rates(init: Callable[[], TrainState]) -> dict[str, jax.Array]:
    """The learning rates in the optimizer's state of init(), by path."""
    leaves = flatten(init().opt_state)
    return {path: leaf for path, leaf in leaves.items() if path.endswith("learning_rate")}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["source", "steps", "may_differ"],
)
@dataclass(frozen=True)
class _Start:
    """The parameters that a run starts from."""

    params: dict[str, jax.Array]
    """By path, in the form of the run's model."""
    source: str
    """The run or folder that they were read from."""
    steps: tuple[int, ...]
    """The steps of a run that they come from."""
    may_differ: bool
    """Whether the run's model has other parameters too, and lacks some of these."""


def _say_differences(start: _Start, params: Any) -> None:
    """Says which of the first `params` of a run `start` lacks, and what of it they leave out."""
    first = flatten(without_adapters(params))
    new = [path for path in first if path not in start.params]
    if start.params and new:
        display.say(f"not in {start.source}, so they start anew: {', '.join(new)}")
    unused = sorted(start.params.keys() - first.keys())
    if unused:
        display.say(f"not in this model, so they are left out: {', '.join(unused)}")


def _read_start(run: OpenRun, task: Task) -> _Start:
    """The parameters of the run or folder that init_from names, on the run's devices.

    A model with another head, or with a block of the user's own, has other parameters too.
    """
    config = run.config
    if task.read_start is not None:
        params = task.read_start(run)
        leaves = {} if params is None else flatten(params)
        return _Start(leaves, config.init_from, (), may_differ=True)
    parent = parent_of(config)
    loaded = load_start(config, run.devices)  # each device reads only its parts
    leaves = _arranged(config, loaded.params, is_stacked=loaded.model.config.scan_layers)
    steps = () if parent is None else tuple(parent.weights.steps)
    return _Start(leaves, config.init_from, steps, may_differ=bool(config.training.block))


def _arranged(config: ExperimentConfig, params: Any, *, is_stacked: bool) -> dict[str, Any]:
    """The leaves of `params`, of stacked blocks or not, in the form of the run's model."""
    if is_stacked == config.model.scan_layers:
        return flatten(params)
    if is_stacked:
        return flatten(jax.jit(unstack_blocks)(params))
    return flatten(jax.jit(stack_blocks)(params))


def _with_start(init: Callable[[], TrainState], start: _Start) -> TrainState:
    """init() with the parameters of `start`, also in its moving average.

    While this is compiled, the random numbers of their first values are left out: nothing reads
    them. Raises `ConfigError` for parameters of other shapes.
    """
    state = init()
    first = flatten(without_adapters(state.params))
    known = start.params
    if start.may_differ:
        known = {path: leaf for path, leaf in known.items() if path in first}
        first = {path: leaf for path, leaf in first.items() if path in known}
    check_shapes(start.source, known, first)

    def with_known(params: Any) -> Any:
        leaves = flatten(without_adapters(params))
        copies = {path: jnp.array(leaf, leaves[path].dtype) for path, leaf in known.items()}
        return replace_base(params, unflatten_dict(leaves | copies, sep="/"))

    average = None if state.ema is None else with_known(state.ema)
    return state.replace(params=with_known(state.params), ema=average)


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
    config: ExperimentConfig, abstract: TrainState, rates: Mapping[str, Any], fingerprint: str
) -> tuple[TrainState, tuple[int, ...]]:
    """The state of the parent with the peak learning rates `rates`, and its step.

    `abstract` has the shapes and shardings of the state, `rates` their paths in its optimizer's.

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
    restored, metadata = checkpoints.restore(abstract, parent.step)
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

    def with_rate(path: str, leaf: Any) -> Any:
        return rates.get(path, leaf)

    return restored.replace(opt_state=map_with_path(with_rate, restored.opt_state)), (step,)
