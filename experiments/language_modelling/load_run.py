"""A run, or a language model in the format of `transformers`: loaded, or started from."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from experiments.harness.runs import run_folder
from experiments.harness.runs.run_folder import RunOptions
from experiments.harness.training import build, initialization
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pretrained import Loaded, load_without_weights
from jaxformer.text import tokenizers

HEADS = (Classifier, TokenClassifier, SpanPredictor)
"""Models with a `backbone`, which is what another task is learned from."""
_LENGTH = 256
_OBJECTIVES: dict[type, Literal["causal", "masked"]] = {
    DecoderOnly: "causal",
    MaskedLanguageModel: "masked",
    EncoderOnly: "masked",
}


def load_run(
    folder: Path,
    options: RunOptions = RunOptions(),
    devices: Strategy | None = None,
) -> Loaded:
    """The model in `folder`; `config` describes also one of transformers.

    Raises `ConfigError` as `build.load_run` does, and for a folder of transformers without a
    language model or without a tokenizer.
    """
    from experiments.language_modelling.finetune_presets import FinetuneConfig

    loaded = build.load_run(folder, options, LanguageConfig, FinetuneConfig, devices=devices)
    return replace(loaded, config=loaded.config or describe(folder, loaded))


def below_head(loaded: Loaded) -> Loaded:
    """`loaded` without the head of a classifier."""
    if not isinstance(loaded.model, HEADS):
        return loaded
    params = loaded.params["backbone"] if loaded.params else loaded.params
    return replace(loaded, model=loaded.model.backbone, params=params)


def describe(folder: str | Path, loaded: Loaded) -> LanguageConfig:
    """A configuration that describes the model of transformers in `folder`.

    Raises `ConfigError` for one that is not a language model, and for one without a tokenizer.
    """
    name = _OBJECTIVES.get(type(loaded.model))
    if name is None:
        raise ConfigError(
            f"{folder} holds a {type(loaded.model).__name__}, but a language model is needed here"
        )
    if loaded.tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer: put its tokenizer.json there")
    model = loaded.model.config
    data = DataConfig(corpus="files", tokenizer=str(folder), seq_len=min(_LENGTH, model.max_len))
    return LanguageConfig(Path(folder).name, model, objective=name, data=data)


def with_pretrained_sizes(config: LanguageConfig) -> LanguageConfig:
    """`config` with the sizes and the tokenizer of what it starts from, if it names something.

    Dropout, dtype and initializer stay those of `config`. Raises `ConfigError`
    for a model of another objective than `config.objective`.
    """
    parent = initialization.parent_of(config)
    if parent is not None:
        return _with_run(config, parent.folder)
    config = initialization.with_parent(config, "language_modelling")
    run = run_folder.folder_of(config.runs, "language_modelling", config.name)
    if not config.init_from or initialization.is_begun(run):
        return config
    folder = initialization.locate_start(config)
    loaded = load_without_weights(folder)
    pretrained = describe(folder, loaded)
    needed = objective(config).model
    if not isinstance(loaded.model, needed):
        raise ConfigError(
            f"{config.init_from} holds a {type(loaded.model).__name__}, but objective="
            f"{config.objective!r} learns a {needed.__name__}: choose a preset of the other "
            "objective"
        )
    return replace(
        config,
        model=initialization.with_sizes(config.model, pretrained.model),
        data=replace(config.data, tokenizer=str(folder)),
    )


def _with_run(config: LanguageConfig, folder: Path) -> LanguageConfig:
    """`config` with the sizes and, unless it continues the run in `folder`, its tokenizer."""
    parent = run_folder.load_config(folder, LanguageConfig)
    if parent.objective != config.objective:
        raise ConfigError(
            f"{folder} has the objective {parent.objective!r}, but this run has "
            f"{config.objective!r}: choose a preset of the other objective"
        )
    path = folder / "tokenizer" / "tokenizer.json"
    size = parent.model.vocab_size  # exact where the parent had a parent, else as asked for
    if not (parent.init_from or parent.continue_from):
        size = tokenizers.load(path).vocab_size
    config = initialization.with_parent(config, "language_modelling")
    data = config.data if config.continue_from else replace(config.data, tokenizer=str(path))
    return replace(config, model=replace(config.model, vocab_size=size), data=data)
