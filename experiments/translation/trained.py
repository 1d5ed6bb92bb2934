"""A model ready to translate: its settings, weights and tokenizers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments import runs
from experiments.translation.prepare import Prepared, load_tokenizers, sized
from experiments.translation.presets import TranslationConfig
from jaxformer.checkpoint import CheckpointError, Checkpoints
from jaxformer.config import ConfigError
from jaxformer.models import EncoderDecoder
from jaxformer.tokenizers import Tokenizer

_WEIGHTS = "weights.json"


class Trained(NamedTuple):
    """A model with everything that turns text into its translation."""

    config: TranslationConfig
    model: EncoderDecoder
    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer


def with_weights(config: TranslationConfig, prepared: Prepared, params: Any) -> Trained:
    """The prepared experiment's model with the weights `params`."""
    model = EncoderDecoder(prepared.model)
    return Trained(config, model, params, prepared.source_tokenizer, prepared.target_tokenizer)


def load_trained(folder: Path) -> Trained:
    """The run in `folder`, with the weights chosen at its end while they last, or its newest.

    Raises `ConfigError` for a folder that is no run, `CheckpointError` for one without a
    complete checkpoint.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give --run the folder of a trained run")
    config = runs.load_config(folder, TranslationConfig)
    checkpoints = Checkpoints(folder / "checkpoints")
    complete = checkpoints.steps()
    if not complete:
        raise CheckpointError(f"{folder} holds no complete checkpoint: train first")
    note = folder / _WEIGHTS
    chosen = json.loads(note.read_text())["steps"] if note.exists() else []
    # A run that goes on after its end prunes what was chosen then.
    steps = chosen if chosen and set(chosen) <= set(complete) else complete[-1:]
    source, target = load_tokenizers(folder)
    model = EncoderDecoder(sized(config.model, source, target))
    return Trained(config, model, mean_weights(config, checkpoints, steps), source, target)


def mean_weights(config: TranslationConfig, checkpoints: Checkpoints, steps: list[int]) -> Any:
    """The mean over `steps` of the parameters, or of their moving averages if there are any."""
    tree = "ema" if config.training.ema_decay > 0 else "params"
    return checkpoints.average_params(steps, tree=tree)


def note_weights(folder: Path, steps: list[int], validation_bleu: float) -> None:
    """Writes down that the run's weights are the mean of those of `steps`."""
    note = {"steps": steps, "validation_bleu": validation_bleu}
    (folder / _WEIGHTS).write_text(json.dumps(note, indent=2) + "\n")
