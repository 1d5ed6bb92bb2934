"""The model of a run, and models of others, ready to translate."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import build, checkpoint_selection, run_folder
from experiments.harness.checkpoint_selection import FINAL, RunOptions
from experiments.translation.prepare import load_tokenizers, sized
from experiments.translation.presets import TranslationConfig
from jaxformer.config import TransformerConfig
from jaxformer.decoding import GenerationConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import Translation, translate
from jaxformer.pretrained import (
    is_pretrained,
    load_generation_config,
    load_pretrained,
)
from jaxformer.text.tokenizers import Tokenizer


class LoadedRun(NamedTuple):
    """A run's model with everything that turns text into its translation."""

    config: TranslationConfig
    model: EncoderDecoder
    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer


def build_model(config: TranslationConfig, sizes: TransformerConfig) -> EncoderDecoder:
    """The model of `sizes` with the values that `config.training` names (`build.build_model`)."""
    return build.build_model(EncoderDecoder, sizes, config.training)


def load_run(folder: Path, options: RunOptions = FINAL) -> LoadedRun:
    """The run in `folder`, with the weights that `options` name.

    Raises `ConfigError` for a folder that is no run, `CheckpointError` for one without a
    complete checkpoint.
    """
    checkpoint_selection.check_folder(folder)
    config = run_folder.load_config(folder, TranslationConfig)
    params = checkpoint_selection.load(folder, config.training, options)
    source, target = load_tokenizers(folder)
    model = build_model(config, sized(config.model, source, target))
    return LoadedRun(config, model, params, source, target)


class Translator(NamedTuple):
    """A model, from here or from elsewhere, that translates lines."""

    model: EncoderDecoder
    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    search: GenerationConfig

    def __call__(self, lines: Sequence[str]) -> list[list[Translation]]:
        """The translations of each line, best first."""
        return translate(
            self.model,
            self.params,
            lines,
            self.source_tokenizer,
            self.target_tokenizer,
            self.search,
        )


def load_translator(
    folder: Path, beam_size: int = 0, least: int = 1, options: RunOptions = FINAL
) -> Translator:
    """The run in `folder` with the weights that `options` name, or a model of `transformers`.

    `beam_size` hypotheses, or with 0 as many as the folder says, but at least `least`. Raises
    `ConfigError` as `load_run`, `load_pretrained` and `load_generation_config` do, and for a
    folder without a tokenizer or with another kind of model.
    """
    if not is_pretrained(folder):
        loaded = load_run(folder, options)
        search = _at_least(loaded.config.search, beam_size, least)
        return Translator(*loaded[1:], search)
    options.check_pretrained()
    model, params, tokenizer, target = load_pretrained(folder)
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(f"{folder} holds a {type(model).__name__}, which does not translate")
    if tokenizer is None or target is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json: write one there, such as with the save_pretrained of "
            "a fast tokenizer of transformers"
        )
    search = _at_least(load_generation_config(folder), beam_size, least)
    return Translator(model, params, tokenizer, target, search)


def _at_least(search: GenerationConfig, beam_size: int, least: int) -> GenerationConfig:
    return replace(search, beam_size=max(beam_size or search.beam_size, least))
