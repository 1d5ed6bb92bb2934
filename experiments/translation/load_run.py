"""The model of a run, and models of others, ready to translate."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.runs import checkpoint_selection, run_folder
from experiments.harness.runs.checkpoint_selection import FINAL, RunOptions
from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.training import build
from experiments.translation.prepare import load_tokenizers, sized
from experiments.translation.presets import TranslationConfig
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import Translation, translate
from jaxformer.pretrained import (
    Loaded,
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


def build_model(config: TranslationConfig) -> EncoderDecoder:
    """The model of `config.model` with the values that `config.training` names."""
    return build.build_model(EncoderDecoder, config.model, config.training)


def load_run(
    folder: Path, options: RunOptions = FINAL, devices: Strategy | None = None
) -> LoadedRun:
    """The run in `folder`, with the weights that `options` name, on `devices` or theirs.

    Raises `ConfigError` for a folder that is no run, `CheckpointError` for one without a
    complete checkpoint.
    """
    checkpoint_selection.check_folder(folder)
    config = run_folder.load_config(folder, TranslationConfig)
    weights = checkpoint_selection.select(folder, config.training, options)
    source, target = load_tokenizers(folder)
    model = build_model(replace(config, model=sized(config.model, source, target)))
    params = weights.read((devices or options.strategy).for_model(model))
    return LoadedRun(config, model, params, source, target)


class Translator(NamedTuple):
    """A model, from here or from elsewhere, that translates lines by its search."""

    model: EncoderDecoder
    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    search: SearchConfig
    options: TranslationOptions = TranslationOptions()

    def __call__(self, lines: Sequence[str]) -> list[list[Translation]]:
        """The translations of each line, best first."""
        loaded = Loaded(*self[:4], settings=self[4:])
        return translate(loaded, lines, details=True)


def load_translator(
    folder: Path,
    options: RunOptions = FINAL,
    decoding: DecodingOptions = DecodingOptions(),
    *,
    n_best: int = 1,
) -> Translator:
    """The run in `folder` with the weights that `options` name, or a model of `transformers`.

    Beam search has a beam of at least `n_best`. Raises `ConfigError` as `load_run`,
    `load_pretrained` and `load_generation_config` do, and for a folder without a tokenizer or with
    another kind of model.
    """
    if not is_pretrained(folder):
        loaded = load_run(folder, options)
        search = _at_least(decoding.search(loaded.config.search), n_best)
        return Translator(*loaded[1:], search, loaded.config.translation)
    options.check_pretrained()
    model, params, tokenizer, target, _ = load_pretrained(folder, strategy=options.strategy)
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(f"{folder} holds a {type(model).__name__}, which does not translate")
    if tokenizer is None or target is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json: write one there, such as with the save_pretrained of "
            "a fast tokenizer of transformers"
        )
    search, settings = load_generation_config(folder)
    search = _at_least(decoding.search(search), n_best)
    return Translator(model, params, tokenizer, target, search, settings)


def _at_least(search: SearchConfig, beam_size: int) -> SearchConfig:
    return replace(search, beam_size=max(search.beam_size, beam_size))
