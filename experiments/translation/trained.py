"""A model ready to translate: its settings, weights and tokenizers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments import runs, weights
from experiments.translation.prepare import Prepared, load_tokenizers, sized
from experiments.translation.presets import TranslationConfig
from jaxformer.config import ConfigError
from jaxformer.generation import OWN, BeamConfig, Manner, Translation, manner_of, translate
from jaxformer.models import EncoderDecoder
from jaxformer.pretrained import load_conventions, load_pretrained, load_target_tokenizer
from jaxformer.tokenizers import Tokenizer

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


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


class Translator(NamedTuple):
    """A model from here or from elsewhere, with all that turns lines into their translations."""

    model: EncoderDecoder
    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    search: BeamConfig
    manner: Manner

    def __call__(self, lines: Sequence[str]) -> list[list[Translation]]:
        """The translations of each line, best first."""
        return translate(
            self.model,
            self.params,
            lines,
            self.source_tokenizer,
            self.target_tokenizer,
            self.search,
            manner=self.manner,
        )


def load_translator(folder: Path, width: int = 0, least: int = 1) -> Translator:
    """The run in `folder`, or the model that `transformers` wrote there.

    `width` hypotheses, or with 0 as many as the folder says, but at least `least`. Raises
    `ConfigError` as `load_trained`, `load_pretrained` and `load_conventions` do, and for a folder
    without a tokenizer or with another kind of model.
    """
    if not any((folder / name).exists() for name in _WEIGHTS):
        trained = load_trained(folder)
        search = trained.config.search
        search = replace(search, width=max(width or search.width, least))
        return Translator(*trained[1:], search, OWN)
    model, params, tokenizer = load_pretrained(folder)
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(f"{folder} holds a {type(model).__name__}, which does not translate")
    if tokenizer is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json: write one there, such as with the save_pretrained of "
            "a fast tokenizer of transformers"
        )
    said = load_conventions(folder)
    said = said._replace(width=max(width or said.width, least))
    search = BeamConfig(width=said.width, alpha=said.length_penalty)
    target = load_target_tokenizer(folder)
    return Translator(model, params, tokenizer, target, search, manner_of(said))
