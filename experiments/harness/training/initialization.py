"""What a run starts from: other weights (init_from), or the state of a run (continue_from)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.tree_util import Partial

from experiments.harness.cli import config_files, display
from experiments.harness.runs import distributed, run_folder
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.shared_inputs import check_shared_folder
from experiments.harness.training import parameters
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.task import Task
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig, dotted_fields, with_fields
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.stacked_blocks import stack_blocks, unstack_blocks
from jaxformer.pretrained import Loaded, is_pretrained, load
from jaxformer.pretrained.hf_folder import locate
from jaxformer.pretrained.model_specs import TRAINING_ONLY
from jaxformer.records import Record
from jaxformer.training.lora import without_adapters
from jaxformer.training.parameters import flatten, map_with_path
from jaxformer.training.train_step import TrainState

C = TypeVar("C")


def parent_of(config: Any) -> RunOptions | None:
    """The run that `config` names by init_from or continue_from; None where it names none.

    A name is RUN, RUN@STEP or RUN@best (last, average, ema). A folder of `transformers` is no run.
    """
    name = config.continue_from or config.init_from
    path, which = config_files.split_step(name)
    if not name or not (path / "checkpoints").is_dir():
        return None
    if which.isdigit():
        return RunOptions(str(path), step=int(which))
    options: Any = {"checkpoint": which} if which else {}
    return RunOptions(str(path), **options)


def with_start(config: C, folder: Path, loaded: Loaded) -> C:
    """`config` with the sizes, model and block of what is `loaded` from `folder`.

    Dropout, dtype and initializer stay those of `config`.
    """
    run: Any = config
    training = run.training
    if loaded.config is not None:
        source: Any = run_folder.load_config(folder, type(run)).training
        # A block that the user gives may add parameters.
        block = (run.init_from and training.block) or source.block
        training = replace(training, model=source.model, block=block)
    model = with_sizes(run.model, loaded.model.config)
    return replace(run, model=model, training=training)


def with_sizes(own: TransformerConfig, source: TransformerConfig) -> TransformerConfig:
    """The sizes and parts of `source`; dropout, dtype and initializer stay those of `own`."""
    return with_fields(source, {name: dotted_fields(own)[name] for name in TRAINING_ONLY})


def start_folder(config: Any, experiment: str) -> Path | None:
    """The folder of the run, or of transformers, that `config` starts from; None for neither.

    It is the run's own once it has begun. Raises `ConfigError` for what is no folder, and for what
    is no run where `continue_from` names it, `CheckpointError` for a run without a checkpoint, and
    `ConfigError` where several processes read other files there.
    """
    own = run_folder.folder_of(config.runs, experiment, config.name)
    if is_begun(own):
        return own
    parent = parent_of(config)
    if config.continue_from and parent is None:
        refuse_parent("continue_from", config.continue_from)
    if not (parent or config.init_from):
        return None
    folder = locate(config.init_from) if parent is None else parent.folder
    if not is_pretrained(folder) and (folder / "config.json").is_file():
        _ = (parent or RunOptions(str(folder))).weights  # raises where it has none
    check_shared_folder(folder, lambda: parent.weights.steps if parent else [])
    return folder


def load_start(config: Any, devices: Strategy) -> Loaded:
    """The run or folder that `config` starts from, with its weights on `devices`."""
    parent = parent_of(config)
    if parent is None:
        return load(config.init_from, strategy=devices)
    checkpoint, step = parent.checkpoint, parent.step
    return load(parent.folder, checkpoint=checkpoint, step=step, strategy=devices)


def is_begun(folder: Path) -> bool:
    """Whether the run in `folder` has the weights of what it starts from."""
    return parent_record(folder).path.exists()


def parent_record(folder: Path) -> Record:
    """The record of the run or folder that the run in `folder` started from."""
    return Record(folder / "parent.json")


def refuse_parent(option: str, name: str) -> NoReturn:
    """Raises `ConfigError`: `name` is not a run."""
    raise ConfigError(
        f"{option}={name!r} is not the folder of a trained run: give RUN, or RUN@STEP"
    )


def take_over(run: OpenRun, task: Task, state: TrainState) -> TrainState:
    """`state`, the first one of `run`, with what it takes over from where it starts.

    A run with a checkpoint of its own goes on from that instead. Raises `ConfigError` for
    parameters of other shapes, and as `_continued` does.
    """
    config, parent = run.config, parent_of(run.config)
    steps: list[int] = []
    option = "continue_from" if config.continue_from else "init_from"
    source = getattr(config, option)
    if not source or run.checkpoints.steps():
        return state
    with display.phase(f"reading {source}"):
        if config.continue_from:
            state, steps = _continued(config, state, parent, task.batches.fingerprint)
        elif task.read_start is not None:
            params, is_stacked = task.read_start(run.devices), config.model.scan_layers
        else:  # each device reads only its parts
            loaded = load_start(config, run.devices)
            params, is_stacked = loaded.params, loaded.model.config.scan_layers
            steps = parent.weights.steps if parent else []
    if not config.continue_from and params is not None:
        is_part = task.read_start is not None
        state = with_loaded(config, state, params, run.devices, is_stacked, is_part=is_part)
    if steps:
        display.say(f"step {', '.join(map(str, steps))} of {source}")
    if distributed.is_first():
        folder = str(parent.folder) if parent else source
        parent_record(run.folder).write({"how": option, "run": folder, "steps": steps})
    return state


def with_loaded(
    config: Any,
    state: TrainState,
    params: Any,
    devices: Strategy,
    is_stacked: bool,
    *,
    is_part: bool = False,
) -> TrainState:
    """`state` with `params`, of stacked blocks or not, of what `config.init_from` names.

    With a block of the user's own, and where they are a part of the model, parameters that it lacks
    keep their first values. Raises `ConfigError` for parameters of other shapes.
    """

    def arranged(params: Any) -> Any:
        if is_stacked == config.model.scan_layers:
            return params
        return unstack_blocks(params) if is_stacked else stack_blocks(params)

    first = flatten(without_adapters(state.params))
    loaded = flatten(jax.eval_shape(arranged, params))
    shapes = {path: x for path, x in loaded.items() if path in first or not is_part}
    may_lack = config.training.block or is_part
    new = {path: x for path, x in first.items() if path not in shapes} if may_lack else {}
    if new:
        display.say(f"not in {config.init_from}, so they start anew: {', '.join(new)}")
    check_shapes(config.init_from, shapes | new, first)

    def merged(params: Any, new: dict[str, Any]) -> Any:
        known = flatten(arranged(params)) | new
        # copies, because a step donates its state's buffers
        copies = {path: jnp.array(known[path], dtype=x.dtype) for path, x in first.items()}
        return unflatten_dict(copies, sep="/")

    make = Partial(merged, params, new)
    return parameters.with_params(state, config.training, lambda: devices.init(make))


def check_shapes(source: Any, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises `ConfigError`, naming the first, for parameters of a run that have other shapes."""
    shapes, needed = ({path: x.shape for path, x in tree.items()} for tree in (given, wanted))
    wrong = sorted(p for p in shapes | needed if shapes.get(p) != needed.get(p))
    if wrong:
        path = wrong[0]
        raise ConfigError(
            f"{source} does not fit this model: {path} is {shapes.get(path, 'absent')} there, but "
            f"{needed.get(path, 'absent')} here ({len(wrong)} parameters differ): use its sizes"
        )


def _continued(
    config: Any, state: TrainState, parent: RunOptions | None, fingerprint: str
) -> tuple[TrainState, list[int]]:
    """The state of the parent, with the peak learning rate of `state`, and its step.

    Raises `ConfigError` where the parent was trained on other batches, has done all steps of
    `config`, or is asked for a mean of checkpoints, `CheckpointError` for another optimizer.
    """
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
    own = flatten(state.opt_state)

    def with_rate(path: str, leaf: Any) -> Any:
        return own[path] if path.endswith("learning_rate") else leaf

    return restored.replace(opt_state=map_with_path(with_rate, restored.opt_state)), [step]
