"""A run, or a folder of pretrained weights, with its model, weights and tokenizer."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.harness.cli import config_files
from experiments.harness.runs import checkpoint_selection, run_folder
from experiments.harness.runs.checkpoint_selection import FINAL, RunOptions
from experiments.harness.runs.run_files import Record
from experiments.language_modelling import init_from_pretrained
from experiments.language_modelling.finetune_presets import FACTS, FinetuneConfig
from experiments.language_modelling.init_from_pretrained import HEADS
from experiments.language_modelling.objectives import build_model
from experiments.language_modelling.prepare import (
    TOKENIZER as TOKENIZER,
)
from experiments.language_modelling.prepare import (
    load_tokenizer,
    sized,
    tokenizer_digest,
)
from experiments.language_modelling.presets import LanguageConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.pretrained import Loaded, is_pretrained
from jaxformer.text.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False, repr=False)
class LoadedRun(Loaded):
    """A model with everything that it needs to read and write text.

    `model` is a `DecoderOnly` when `config.objective` is "causal", else a `MaskedLanguageModel`, or
    an `EncoderOnly` where a pretrained folder holds no more.
    """

    tokenizer: Tokenizer = field()
    config: LanguageConfig = field(kw_only=True)


def load_run(
    folder: Path,
    options: RunOptions = FINAL,
    *,
    devices: Strategy | None = None,
    without_head: bool = False,
) -> LoadedRun:
    """The run in `folder`, with the weights that `options` name, on `devices` or theirs.

    The folder may also hold pretrained weights, as `load_pretrained` reads them; `without_head`
    takes a classifier too, and leaves its head out.

    Raises `ConfigError` for a folder that is no run, and for a tokenizer that is not the one of
    its training, `CheckpointError` for one without a complete checkpoint.
    """
    checkpoint_selection.check_folder(folder)
    if is_pretrained(folder):
        options.check_pretrained()
        pretrained, found = init_from_pretrained.read(
            folder, devices or options.strategy, without_head=without_head
        )
        assert found.tokenizer is not None  # `read` refuses a folder without one
        return LoadedRun(found.model, found.params, found.tokenizer, config=pretrained)
    is_task = "task" in config_files.read_object(folder / "config.json")
    kind = FinetuneConfig if is_task else LanguageConfig
    config: Any = run_folder.load_config(folder, kind)
    weights = checkpoint_selection.select(folder, config.training, options)
    tokenizer = load_tokenizer(folder)
    if Checkpoints(folder / "checkpoints").metadata()["tokenizer"] != tokenizer_digest(folder):
        raise ConfigError(
            f"{folder / 'tokenizer'} is not the tokenizer that the run was trained with, and does "
            "not fit its weights: put the run's own back"
        )
    sized_config: Any = replace(config, model=sized(config, tokenizer))
    model: Any = _task_model(sized_config, folder) if is_task else build_model(sized_config)
    params = weights.read((devices or options.strategy).for_model(model))
    if without_head and isinstance(model, HEADS):
        model, params = model.backbone, params["backbone"]
    return LoadedRun(model, params, tokenizer, config=config)


def _task_model(config: FinetuneConfig, folder: Path) -> Any:
    """The model of a fine-tuned run."""
    from experiments.language_modelling.tasks import TASKS

    labels = Record(folder / FACTS).read(labels=list).get("labels", [])
    return TASKS[config.task.kind].make_model(config, labels)
