"""The start of a fine-tuning: model, tokenizer and weights of a run or of a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training import parent
from experiments.harness.training.open_run import OpenRun
from experiments.language_modelling import load_run
from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.prepare import TOKENIZER
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.pretrained import load_sampling_config
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer


def with_start(config: FinetuneConfig) -> FinetuneConfig:
    """`config` with the model, the tokenizer and the settings of sampling of what it starts from.

    Dropout, dtype and initializer stay as in `config`, and so does sampling that is not the
    default. A run that has begun no longer needs what it started from. Raises `ConfigError` for a
    run that starts from nothing, and for a setting that contradicts what it starts from.
    """
    folder = parent.start_folder(config, "finetuning")
    if folder is None:
        raise ConfigError("a fine-tuning starts from a model: give --init_from RUN")
    with display.phase(f"reading the sizes of {folder}"):
        loaded = load_run.read_start(folder)
    source, tokenizer = load_run.start_settings(config, loaded, folder, "finetuning")
    _check_same(config, source, folder)
    model = loaded.model.config
    if loaded.config is None and source.objective == "causal":
        sampling, completion = load_sampling_config(folder, model.max_len)
        source = replace(source, sampling=sampling, completion=completion)
    elif loaded.config is None and config.task.kind in ("classification", "pairs"):
        model = replace(model, pooler="tanh")  # published classifiers have one
    if config.data.seq_len > model.max_len:
        display.say(
            f"rows have {model.max_len} tokens, not data.seq_len={config.data.seq_len}: the "
            f"positions of {folder} end there"
        )
    data = replace(
        config.data,
        tokenizer=tokenizer,
        seq_len=min(config.data.seq_len, model.max_len),
        isolate_documents=source.data.isolate_documents,
    )
    settings = {
        name: getattr(source, name)
        for name in ("sampling", "completion")
        if getattr(config, name) == getattr(LanguageConfig, name)
    }
    training = config.training
    if loaded.config is not None:
        training = parent.with_modules(training, config, source.training, folder)
    return replace(
        config,
        model=parent.with_sizes(config.model, model),
        training=training,
        objective=source.objective,
        data=data,
        **settings,
    )


def _check_same(config: FinetuneConfig, source: LanguageConfig, folder: Path) -> None:
    """Raises `ConfigError` for a setting of `config` that differs from `source` in `folder`.

    A default stands for the setting of what the run starts from.
    """
    settings = {
        "objective": (config.objective, source.objective, LanguageConfig.objective),
        "data.isolate_documents": (
            config.data.isolate_documents,
            source.data.isolate_documents,
            DataConfig.isolate_documents,
        ),
    }
    for name, (given, there, default) in settings.items():
        if given not in (there, default):
            raise ConfigError(
                f"{name} is {given} here, but {there} in {folder}, which this run starts from: "
                "leave the option out"
            )


def prepare_tokenizer(config: FinetuneConfig, folder: Path) -> Tokenizer:
    """The tokenizer of what the run in `folder` starts from, copied there."""
    path = folder / TOKENIZER
    tokenizer = None
    with display.phase("reading the tokenizer"):
        with distributed.together():
            if distributed.is_first() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                tokenizer = tokenizers.load(config.data.tokenizer)
                tokenizer.save(path)
        if tokenizer is None:
            tokenizer = tokenizers.load(path)
    tokenizer.check_fits(config.model.vocab_size)
    return tokenizer


def read_weights(run: OpenRun) -> Any:
    """The parameters that the run starts with, on its devices; None: random ones.

    A model with a head gives the parameters below it, the "backbone" of a model with another head.
    """
    config = run.config
    if config.task.from_scratch:
        return None
    loaded = load_run.below_head(parent.load_start(config, run.devices))
    is_masked = isinstance(loaded.model, MaskedLanguageModel)
    params = loaded.params["encoder"] if is_masked else loaded.params
    return params if config.task.kind in ("chat", "preference") else {"backbone": params}
