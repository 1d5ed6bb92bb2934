"""The start of a run: the weights of another run (init_from), or its state (continue_from)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.tree_util import Partial

from experiments.harness.cli import config_files, display
from experiments.harness.runs import checkpoint_selection, distributed, run_folder
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.run_files import Record
from experiments.harness.training import build
from experiments.harness.training.session import OpenRun
from experiments.harness.training.task import Task
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import dotted_fields, with_fields
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.stacked_blocks import stack_blocks, unstack_blocks
from jaxformer.pretrained import load_pretrained
from jaxformer.pretrained.model_specs import TRAINING_ONLY
from jaxformer.text.data import all_rows
from jaxformer.training.lora import without_adapters
from jaxformer.training.parameters import flatten, map_with_path
from jaxformer.training.train_step import TrainState

C = TypeVar("C")


class Parent(NamedTuple):
    """The run that another one starts from, and which of its weights."""

    folder: Path
    options: RunOptions


def parent_of(config: Any) -> Parent | None:
    """The run that `config` names by init_from or continue_from; None where it names none.

    A folder of `transformers` is no run.
    """
    return find_run(config.continue_from or config.init_from)


def find_run(name: str) -> Parent | None:
    """The run RUN, RUN@STEP or RUN@best (last, average, ema); None where there is none."""
    path, which = config_files.split_step(name)
    if not name or not (path / "checkpoints").is_dir():
        return None
    if which.isdigit():
        return Parent(path, RunOptions(str(path), step=int(which)))
    options: Any = {"checkpoint": which} if which else {}
    return Parent(path, RunOptions(str(path), **options))


def with_parent(config: C, experiment: str) -> C:
    """`config` with the sizes, model and block of the run it starts from.

    Dropout, dtype and initializer stay those of `config`. Raises `ConfigError` where
    `continue_from` names what is not a run; a run that has begun no longer needs its parent.
    """
    run: Any = config
    parent = parent_of(run)
    if parent is None:
        if run.continue_from and not is_begun(run_folder.folder_of(run.runs, experiment, run.name)):
            refuse_parent("continue_from", run.continue_from)
        return config
    source: Any = run_folder.load_config(parent.folder, type(config))
    kept = {name: dotted_fields(run.model)[name] for name in TRAINING_ONLY}
    parts = ("model", "block")
    values = {name: getattr(source.training, name) for name in parts}
    if run.init_from and run.training.block:  # a block that the user gives may add parameters
        values["block"] = run.training.block
    model, training = with_fields(source.model, kept), replace(run.training, **values)
    return replace(run, model=model, training=training)


def is_begun(folder: Path) -> bool:
    """Whether the run in `folder` started from another run."""
    return parent_record(folder).path.exists()


def parent_record(folder: Path) -> Record:
    """The record of the run or folder that the run in `folder` started from."""
    return Record(folder / "parent.json")


def refuse_parent(option: str, name: str) -> NoReturn:
    """Raises `ConfigError`: `name` is not a run."""
    raise ConfigError(
        f"{option}={name!r} is not the folder of a trained run: give RUN, or RUN@STEP"
    )


def start(run: OpenRun, task: Task) -> tuple[OpenRun, TrainState, Any]:
    """`run` on the devices of its model, its first state, and its step.

    The state has what the run takes over from the run or the folder that it starts from.
    """
    run = replace(run, devices=run.devices.for_model(task.model))
    batch = task.batches.batch(0, all_rows)
    init, step = task.make_step(run.config, task.model, batch, run.devices)
    with display.phase("creating the model"):
        state = run.devices.init(init)
    if task.read_start is not None and not run.config.continue_from:
        return run, _begun(run, task.read_start, state), step
    return run, take_over(run, task.model, state, task.batches.fingerprint), step


def _begun(run: OpenRun, read: Callable[[Strategy], Any], state: TrainState) -> TrainState:
    """`state` with the parameters that a task reads."""
    if run.checkpoints.steps():
        return state
    source = run.config.init_from
    with display.phase(f"reading {source}"):
        params = read(run.devices)
    if distributed.is_first():
        parent_record(run.folder).write({"how": "init_from", "run": source, "steps": []})
    if params is None:
        return state
    make = Partial(partial(jax.tree.map, partial(jnp.array, dtype=jnp.float32)), params)
    return with_loaded(run.config, state, make, run.devices, source, is_part=True)


def take_over(run: OpenRun, model: Any, state: TrainState, fingerprint: str) -> TrainState:
    """`state`, the first one of `run`, with what it takes over from where it starts.

    A run with a checkpoint of its own goes on from that instead. Raises `ConfigError` for
    parameters of other shapes, and as `_continued` does.
    """
    config = run.config
    parent = parent_of(config)
    if run.checkpoints.steps():
        return state
    if parent is None:
        is_folder = config.init_from and not is_begun(run.folder)
        return _pretrained(config, state, run.devices) if is_folder else state
    with display.phase(f"reading {parent.folder}"):
        if config.continue_from:
            state, steps = _continued(config, state, parent, fingerprint)
        else:
            state, steps = _initialized(config, model, state, parent, run.devices)
    option = "continue_from" if config.continue_from else "init_from"
    numbers = ", ".join(map(str, steps))
    display.say(f"{option.replace('_', ' ')} {parent.folder}, step {numbers}")
    if distributed.is_first():
        record = {"how": option, "run": str(parent.folder), "steps": steps}
        parent_record(run.folder).write(record)
    return state


def _pretrained(config: Any, state: TrainState, devices: Strategy) -> TrainState:
    """`state` with the parameters of the folder of `transformers` that `config` starts from.

    Each device reads only its parts from the files.
    """

    def arranged(params: Any) -> Any:  # copies, because a step donates its state's buffers
        params = jax.tree.map(partial(jnp.array, dtype=jnp.float32), params)
        return stack_blocks(params) if config.model.scan_layers else params

    params: Any = load_pretrained(config.init_from, strategy=devices).params
    return with_loaded(config, state, Partial(arranged, params), devices, config.init_from)


def _initialized(
    config: Any, model: Any, state: TrainState, parent: Parent, devices: Strategy
) -> tuple[TrainState, list[int]]:
    """`state` with the parent's weights, and the steps whose mean they are."""
    theirs: Any = run_folder.load_config(parent.folder, type(config))
    weights = checkpoint_selection.select(parent.folder, parent.options)
    is_stacked, needs_stacked = theirs.model.scan_layers, config.model.scan_layers
    if is_stacked == needs_stacked:
        params = weights.read(devices)
    else:  # stacked parameters are divided in another way
        stored = model.clone(config=replace(model.config, scan_layers=is_stacked))
        params = weights.read(devices.for_model(stored))

    def arranged(params: Any) -> Any:  # copies, because a step donates its state's buffers
        params = jax.tree.map(jnp.array, params)
        if is_stacked == needs_stacked:
            return params
        return stack_blocks(params) if needs_stacked else unstack_blocks(params)

    make = Partial(arranged, params)
    return with_loaded(config, state, make, devices, parent.folder), weights.steps


def with_loaded(
    config: Any,
    state: TrainState,
    make: Callable[[], Any],
    devices: Strategy,
    source: Any,
    *,
    is_part: bool = False,
) -> TrainState:
    """`state` with the parameters make() of the folder `source`; `make` is a pytree.

    With a block of the user's own, and where they are a part of the model, parameters that `source`
    lacks keep their first values. Raises `ConfigError` for parameters of other shapes.
    """
    loaded, first = jax.eval_shape(make), without_adapters(state.params)
    needed = set(flatten(first) if is_part else flatten(loaded))  # a head may be left out
    shapes = {path: leaf for path, leaf in flatten(loaded).items() if path in needed}
    stored = shapes if config.training.block or is_part else flatten(first)
    new = {path: leaf for path, leaf in flatten(first).items() if path not in stored}
    if new:
        display.say(f"not in {source}, so they start anew: {', '.join(new)}")
    check_shapes(source, unflatten_dict(shapes | new, sep="/"), first)

    def merged(make: Callable[[], Any], new: dict[str, Any]) -> Any:
        # copies, because a step donates its state's buffers
        known = {path: x for path, x in flatten(make()).items() if path in needed}
        return unflatten_dict(known | jax.tree.map(jnp.array, new), sep="/")

    make = Partial(merged, make, new)
    return build.with_params(state, config.training, lambda: devices.init(make))


def check_shapes(folder: Path, params: Any, needed: Any) -> None:
    """Raises `ConfigError`, naming the first, for parameters of a run that have other shapes."""
    given, wanted = ({p: x.shape for p, x in flatten(tree).items()} for tree in (params, needed))
    wrong = sorted(p for p in given | wanted if given.get(p) != wanted.get(p))
    if wrong:
        path = wrong[0]
        raise ConfigError(
            f"{folder} does not fit this model: {path} is {given.get(path, 'absent')} there, but "
            f"{wanted.get(path, 'absent')} here ({len(wrong)} parameters differ): use its sizes"
        )


def _continued(
    config: Any, state: TrainState, parent: Parent, fingerprint: str
) -> tuple[TrainState, list[int]]:
    """The state of the parent, with the peak learning rate of `state`, and its step.

    Raises `ConfigError` where the parent was trained on other batches, has done all steps of
    `config`, or is asked for a mean of checkpoints, `CheckpointError` for another optimizer.
    """
    if parent.options.checkpoint not in ("final", "last"):
        raise ConfigError(
            f"continue_from={config.continue_from!r} asks for weights without an optimizer state: "
            "give RUN or RUN@STEP, or use --init_from"
        )
    checkpoints = Checkpoints(parent.folder / "checkpoints")
    restored, metadata = checkpoints.restore(state, parent.options.step)
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
    ours = flatten(state.opt_state)

    def own_rate(path: str, leaf: Any) -> Any:
        return ours[path] if path.endswith("learning_rate") else leaf

    return restored.replace(opt_state=map_with_path(own_rate, restored.opt_state)), [step]
