"""A language model ready for use: its settings, weights and tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

from flax import linen as nn

from experiments import runs, weights
from experiments.language_modelling import borrowed
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import Prepared, load_tokenizer, sized, tokenizer_digest
from experiments.language_modelling.presets import LanguageConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import ConfigError
from jaxformer.models import EncoderOnly
from jaxformer.tokenizers import Tokenizer


class Trained(NamedTuple):
    """A model with everything that turns text into more of it, or into vectors.

    `model` is a `DecoderOnly` when `config.objective` is "causal", else a `MaskedLanguageModel`, or
    an `EncoderOnly` when others made it so.
    """

    config: LanguageConfig
    model: nn.Module
    params: Any
    tokenizer: Tokenizer


def with_weights(config: LanguageConfig, prepared: Prepared, params: Any) -> Trained:
    """The prepared experiment's model with the weights `params`."""
    return Trained(config, objective(config).model(prepared.model), params, prepared.tokenizer)


def load_trained(folder: Path) -> Trained:
    """The run in `folder`, with the weights chosen at its end while they last, or its newest.

    The folder may also be other people's, as `load_pretrained` reads it.

    Raises `ConfigError` for a folder that is no run, and for a tokenizer that is not the one of
    its training, `CheckpointError` for one without a complete checkpoint.
    """
    weights.check_folder(folder)
    if borrowed.is_theirs(folder):
        config, found = borrowed.read(folder)
        return Trained(config, *found)
    config = runs.load_config(folder, LanguageConfig)
    params = weights.load(folder, config.training)
    tokenizer = load_tokenizer(folder)
    if Checkpoints(folder / "checkpoints").facts()["tokenizer"] != tokenizer_digest(folder):
        raise ConfigError(
            f"{folder / 'tokenizer'} is not the tokenizer that the run was trained with, and does "
            "not fit its weights: put the run's own back"
        )
    return Trained(config, objective(config).model(sized(config, tokenizer)), params, tokenizer)


def load_objective(folder: Path, wanted: str, instead: str) -> Trained:
    """As `load_trained`, for a run of the objective `wanted`: `ConfigError` names `instead`."""
    trained = load_trained(folder)
    if trained.config.objective != wanted:
        raise ConfigError(
            f"{folder} has the objective {trained.config.objective!r}, but this needs a "
            f"{wanted!r} one: use {instead}"
        )
    if isinstance(trained.model, EncoderOnly):
        raise ConfigError(f"{folder} holds an encoder without the head that fills in: use embed")
    return trained
