"""The run or folder that a run starts from: init_from or continue_from."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments.harness.cli import config_files
from experiments.harness.runs import run_folder
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.shared_inputs import check_shared_folder
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.training_config import TrainingConfig
from jaxformer.config import TransformerConfig, dotted_fields, with_fields
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.pretrained import Loaded, TrainedRun, is_pretrained, open_folder
from jaxformer.pretrained.hf_folder import locate
from jaxformer.pretrained.model_specs import TRAINING_ONLY
from jaxformer.records import Record

C = TypeVar("C", bound=ExperimentConfig)
T = TypeVar("T", bound=TrainingConfig)


def parent_of(config: ExperimentConfig) -> RunOptions | None:
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

    Dropout, dtype and initializer stay as in `config`.
    """
    model = with_sizes(config.model, loaded.model.config)
    training = config.training
    if loaded.config is not None:
        source = run_folder.load_config(folder, type(config)).training
        training = with_modules(training, config, source, folder)
    return replace(config, model=model, training=training)


def with_modules(training: T, config: ExperimentConfig, source: TrainingConfig, folder: Path) -> T:
    """The `training` of `config` with the model and the block of the run in `folder`.

    The training of that run is `source`. A block that is given with `init_from` may add parameters,
    and stays. Raises `ConfigError` for another model, and where steps go on for another block.
    """
    _check_module("training.model", training.model, source.model, folder)
    if config.init_from and training.block:
        return replace(training, model=source.model)
    _check_module("training.block", training.block, source.block, folder)
    return replace(training, model=source.model, block=source.block)


def _check_module(option: str, given: str, there: str, folder: Path) -> None:
    if given not in ("", there):
        own = repr(there) if there else "the library's"
        raise ConfigError(
            f"{option}={given!r} is given, but the weights in {folder} are of {own}: leave the "
            "option out"
        )


def with_sizes(config: TransformerConfig, source: TransformerConfig) -> TransformerConfig:
    """The sizes and parts of `source`, with dropout, dtype and initializer of `config`."""
    settings = dotted_fields(config)
    return with_fields(source, {name: settings[name] for name in TRAINING_ONLY})


def start_folder(config: ExperimentConfig, experiment: str) -> Path | None:
    """The folder of the run, or of transformers, that `config` starts from; None for neither.

    It is the run's own once it has begun. Raises `ConfigError` for what is no folder, and for what
    is no run where `continue_from` names it, `CheckpointError` for a run without a checkpoint, and
    `ConfigError` where several processes read other files there.
    """
    own_folder = run_folder.folder_of(config.runs, experiment, config.name)
    if is_begun(own_folder):
        return own_folder
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


def load_start(config: ExperimentConfig, devices: Strategy) -> Loaded:
    """The model that `config` starts from, with its weights on `devices` and without tokenizers."""
    parent = parent_of(config)
    source = open_folder(config.init_from if parent is None else parent.folder)
    if isinstance(source, TrainedRun):
        options = parent or RunOptions(config.init_from)
        source = source.with_weights(options.checkpoint, options.step)
    model = source.model()
    return Loaded(model, source.params(model, devices))


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
