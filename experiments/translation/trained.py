"""A model ready to translate: its settings, weights and tokenizers."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments import runs, weights
from experiments.translation.prepare import Prepared, load_tokenizers, sized
from experiments.translation.presets import TranslationConfig
from jaxformer.models import EncoderDecoder
from jaxformer.tokenizers import Tokenizer


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
    weights.check_folder(folder)
    config = runs.load_config(folder, TranslationConfig)
    params = weights.load(folder, config.training)
    source, target = load_tokenizers(folder)
    model = EncoderDecoder(sized(config.model, source, target))
    return Trained(config, model, params, source, target)
