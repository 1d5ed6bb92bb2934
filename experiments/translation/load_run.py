"""The model of a run, and models of others, ready to translate."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.harness.cli import config_files
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
from jaxformer.pretrained import Loaded, is_pretrained, load_generation_config, load_pretrained
from jaxformer.text.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False, repr=False)
class Translator(Loaded):
    """An encoder-decoder, from here or from elsewhere, that can translate."""

    tokenizer: Tokenizer = field()
    target_tokenizer: Tokenizer = field()
    settings: tuple[SearchConfig, TranslationOptions] = field()


@dataclass(frozen=True, eq=False, repr=False)
class LoadedRun(Translator):
    """The model of a run."""

    config: TranslationConfig = field(kw_only=True)


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
    path = folder / "config.json"
    if path.exists() and "task" in config_files.read_object(path):
        return _finetuned(folder, options, devices)
    config = run_folder.load_config(folder, TranslationConfig)
    weights = checkpoint_selection.select(folder, config.training, options)
    tokenizers = load_tokenizers(folder)
    model = build_model(replace(config, model=sized(config.model, *tokenizers)))
    params = weights.read((devices or options.strategy).for_model(model))
    settings = config.search, config.translation
    return LoadedRun(model, params, *tokenizers, settings, config=config)


def _finetuned(folder: Path, options: RunOptions, devices: Strategy | None) -> LoadedRun:
    """The run of a fine-tuning, whose tokenizers have ids of their own."""
    from experiments.translation import finetune_start
    from experiments.translation.finetune_presets import FinetuneConfig

    config = run_folder.load_config(folder, FinetuneConfig)
    weights = checkpoint_selection.select(folder, config.training, options)
    loaded = finetune_start.load(config, folder, None)
    params = weights.read((devices or options.strategy).for_model(loaded.model))
    both = loaded.tokenizer, loaded.target_tokenizer
    return LoadedRun(loaded.model, params, *both, loaded.settings, config=config)


def load_translator(
    folder: Path,
    options: RunOptions = FINAL,
    decoding: DecodingOptions = DecodingOptions(),
    *,
    n_best: int = 1,
    devices: Strategy | None = None,
) -> Translator:
    """The run in `folder` with the weights that `options` name, or a model of `transformers`.

    Beam search has a beam of at least `n_best`. Raises `ConfigError` as `load_run`,
    `load_pretrained` and `load_generation_config` do, and for a folder without a tokenizer or with
    another kind of model.
    """
    if is_pretrained(folder):
        options.check_pretrained()
        translator = _pretrained(folder, devices or options.strategy)
    else:
        translator = load_run(folder, options, devices)
    search, settings = decoding.settings(*translator.settings)
    search = replace(search, beam_size=max(search.beam_size, n_best))
    return replace(translator, settings=(search, settings))


def _pretrained(folder: Path, strategy: Strategy) -> Translator:
    loaded = load_pretrained(folder, strategy=strategy)
    if not isinstance(loaded.model, EncoderDecoder):
        name = type(loaded.model).__name__
        raise ConfigError(f"{folder} holds a {name}, which does not translate")
    if loaded.tokenizer is None or loaded.target_tokenizer is None:
        raise ConfigError(
            f"{folder} has no tokenizer.json: write one there, such as with the save_pretrained of "
            "a fast tokenizer of transformers"
        )
    tokenizers = loaded.tokenizer, loaded.target_tokenizer
    return Translator(loaded.model, loaded.params, *tokenizers, load_generation_config(folder))
