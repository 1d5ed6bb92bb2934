"""A run, or a translation model of transformers, with its search for translations."""

from dataclasses import replace
from pathlib import Path

from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import loading
from experiments.translation.presets import TranslationConfig
from experiments.translation.scoring import search_of
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import Loaded


def load_run(
    folder: Path,
    options: RunOptions = RunOptions(),
    *,
    devices: Strategy | None = None,
) -> Loaded:
    """The model in `folder`; its `settings` are its `SearchConfig` and `TranslationOptions`.

    Raises `ConfigError` as `loading.load_run` does, and for a folder without a tokenizer or with
    another kind of model.
    """
    loaded = loading.load_run(folder, options, TranslationConfig, devices=devices)
    if loaded.config is None and not isinstance(loaded.model, EncoderDecoder):
        name = type(loaded.model).__name__
        raise ConfigError(f"{folder} holds a {name}, which does not translate")
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json: write one there, such as with the save_pretrained of "
            "a fast tokenizer of transformers"
        )
    return replace(loaded, settings=search_of(loaded))


def load_decoding(folder: Path, options: DecodingOptions, n_best: int = 1) -> Loaded:
    """`load_run` with the settings that `options` change; a beam has at least `n_best` texts."""
    loaded = load_run(folder, options)
    search, translation = options.settings(*search_of(loaded))
    search = replace(search, beam_size=max(search.beam_size, n_best))
    return replace(loaded, settings=(search, translation))
