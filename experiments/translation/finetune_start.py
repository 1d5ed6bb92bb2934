"""What a fine-tuning starts from: model, tokenizers, search and weights of a run or a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness.runs import distributed, run_folder
from experiments.harness.training import initialization
from experiments.harness.training.build import build_model
from experiments.translation.finetune_presets import FinetuneConfig
from experiments.translation.load_run import load_run
from experiments.translation.prepare import load_tokenizers, sized
from jaxformer.config import dotted_fields, with_fields
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import Loaded, load_generation_config, load_without_weights
from jaxformer.pretrained.hf_folder import locate
from jaxformer.pretrained.model_specs import TRAINING_ONLY
from jaxformer.text import tokenizers

_FILES = "source.json", "target.json"


def with_start(config: FinetuneConfig) -> FinetuneConfig:
    """`config` with the model and the search of what it starts from; dropout and dtype stay.

    A run that has begun no longer needs what it started from. Raises `ConfigError` for a run that
    starts from nothing, or from another kind of model.
    """
    own = run_folder.folder_of(config.runs, "finetuning", config.name)
    parent = initialization.parent_of(config)
    if initialization.is_begun(own) or parent is not None:
        folder = own if parent is None else parent.folder
        source: Any = run_folder.load_config(folder, FinetuneConfig)
        model = source.model if parent is None else sized(source.model, *load_tokenizers(folder))
        search, translation = source.search, source.translation
    elif config.init_from:
        folder = locate(config.init_from)
        loaded: Any = load_without_weights(folder)
        if not isinstance(loaded.model, EncoderDecoder):
            name = type(loaded.model).__name__
            raise ConfigError(f"{config.init_from} holds a {name}, which does not translate")
        model = loaded.model.config
        search, translation = load_generation_config(folder)
    else:
        raise ConfigError("pairs are learned from a model: give --init_from RUN")
    search = replace(search, beam_size=config.task.beam_size or search.beam_size)
    kept = {name: dotted_fields(config.model)[name] for name in TRAINING_ONLY}
    model = with_fields(model, kept)
    return replace(config, model=model, search=search, translation=translation)


def load(config: FinetuneConfig, folder: Path, params: Any) -> Loaded:
    """The model of the run in `folder` with its tokenizers, which are copied there at first."""
    place = folder / "tokenizer"
    with distributed.together():
        if distributed.is_first() and not (place / _FILES[-1]).exists():
            place.mkdir(parents=True, exist_ok=True)
            source, target = _tokenizers(config)
            if source is not target:
                source.save(place / _FILES[0])
            target.save(place / _FILES[1])
    target = tokenizers.load(place / _FILES[1])
    is_joint = not (place / _FILES[0]).exists()
    source = target if is_joint else tokenizers.load(place / _FILES[0])
    settings = config.search, config.translation
    return Loaded(build_model(config), params, source, target, settings, config)


def read_weights(config: FinetuneConfig, devices: Strategy) -> Any:
    """The parameters that the run starts with, on `devices`."""
    parent = initialization.parent_of(config)
    if parent is not None:
        return load_run(parent.folder, parent.options, devices=devices).params
    return load_run(locate(config.init_from), devices=devices).params


def _tokenizers(config: FinetuneConfig) -> tuple[Any, Any]:
    parent = initialization.parent_of(config)
    if parent is not None:
        return load_tokenizers(parent.folder)
    loaded = load_without_weights(locate(config.init_from))
    if loaded.tokenizer is None or loaded.target_tokenizer is None:
        raise ConfigError(f"{config.init_from} has no tokenizer.json: write one there")
    return loaded.tokenizer, loaded.target_tokenizer
