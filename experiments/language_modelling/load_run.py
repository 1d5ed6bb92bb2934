"""A run, or a language model in the format of `transformers`: loaded, or started from."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from experiments.harness.runs import run_folder
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import loading, parent
from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pretrained import Loaded, PublishedModel, open_folder

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

    Raises `ConfigError` as `loading.load_run` does, and for a folder of transformers without a
    language model or without a tokenizer.
    """
    loaded = loading.load_run(folder, options, LanguageConfig, FinetuneConfig, devices=devices)
    return replace(loaded, config=loaded.config or describe(folder, loaded.model))


def below_head(loaded: Loaded) -> Loaded:
    """`loaded` without the head of a classifier."""
    if not isinstance(loaded.model, HEADS):
        return loaded
    params = loaded.params["backbone"] if loaded.params else loaded.params
    return replace(loaded, model=loaded.model.backbone, params=params)


def read_start(folder: Path) -> Loaded:
    """The model that a run starts from, without its head and weights, and the settings of a run.

    A run's tokenizer is read and compared with the run's weights; the tokenizer of a folder of
    transformers, which may take seconds, is not.
    """
    source = open_folder(folder)
    if isinstance(source, PublishedModel):
        return below_head(Loaded(source.model(), {}))
    if source.is_trained:
        source = source.with_weights()
    return below_head(Loaded(source.model(), {}, *source.tokenizers(), config=source.config))


def describe(folder: str | Path, model: Any) -> LanguageConfig:
    """A configuration that describes the `model` of transformers in `folder`.

    Raises `ConfigError` for one that is not a language model, and for one without a tokenizer.
    """
    name = _OBJECTIVES.get(type(model))
    if name is None:
        raise ConfigError(
            f"{folder} holds a {type(model).__name__}, but a language model is needed here"
        )
    source = open_folder(folder)
    tokenizer = source.tokenizer_folder if isinstance(source, PublishedModel) else None
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer: put its tokenizer.json there")
    sizes = model.config
    data = DataConfig(corpus="files", tokenizer=str(tokenizer), seq_len=min(_LENGTH, sizes.max_len))
    return LanguageConfig(Path(folder).name, sizes, objective=name, data=data)


def with_pretrained_sizes(config: LanguageConfig) -> LanguageConfig:
    """`config` with the sizes and the tokenizer of what it starts from, if it names something.

    Dropout, dtype and initializer stay as in `config`, and so does the tokenizer of a run that
    continues another. Raises `ConfigError` for a model of another objective than in `config`.
    """
    folder = parent.start_folder(config, "language_modelling")
    if folder is None:
        return config
    loaded = read_start(folder)
    source, tokenizer = start_settings(config, loaded, folder, "language_modelling")
    if source.objective != config.objective or isinstance(loaded.model, EncoderOnly):
        raise ConfigError(
            f"{folder} holds a {type(loaded.model).__name__} of the objective {source.objective!r}"
            f", but objective={config.objective!r} learns a {objective_of(config).model.__name__}: "
            "choose a preset of the other objective"
        )
    data = replace(config.data, tokenizer=tokenizer)
    started = parent.with_start(config, folder, loaded)
    return replace(started, data=config.data if config.continue_from else data)


def start_settings(
    config: LanguageConfig, loaded: Loaded, folder: Path, experiment: str
) -> tuple[LanguageConfig, str]:
    """The settings of what is `loaded` from the `folder` that a run starts from, and its tokenizer.

    The `experiment` is the run's.
    """
    if loaded.config is None:
        described = describe(folder, loaded.model)
        return described, described.data.tokenizer
    kinds: tuple[type[LanguageConfig], ...] = (LanguageConfig, type(config))
    source = run_folder.load_config(folder, *kinds)
    if folder == run_folder.folder_of(config.runs, experiment, config.name):
        return source, source.data.tokenizer
    return source, str(folder / "tokenizer" / "tokenizer.json")
