"""Other people's weights, in the place of a run's or as its beginning."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.language_modelling.objectives import objective
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from jaxformer.config import ConfigError
from jaxformer.data import DataError
from jaxformer.heads import MaskedLanguageModel
from jaxformer.models import DecoderOnly, EncoderOnly
from jaxformer.parallel import Devices
from jaxformer.pretrained import Pretrained, load_pretrained
from jaxformer.pretrained.files import Folder
from jaxformer.pretrained.hub import locate
from jaxformer.pretrained.subjects import UNSEEN
from jaxformer.training import TrainState

_LENGTH = 256
_OBJECTIVES = {DecoderOnly: "causal", MaskedLanguageModel: "masked", EncoderOnly: "masked"}


def is_theirs(folder: Path) -> bool:
    """Whether `folder` holds a model as `transformers` writes it, and is no run."""
    try:
        return "model_type" in Folder(folder).json("config.json")
    except (ConfigError, DataError):
        return False


def read(folder: str | Path) -> tuple[LanguageConfig, Pretrained]:
    """What the folder holds, and a configuration that says what it is.

    Raises `ConfigError` for a model that is none of language, and for one without a tokenizer.
    """
    found = load_pretrained(folder)
    name = _OBJECTIVES.get(type(found.model))
    if name is None:
        raise ConfigError(
            f"{folder} holds a {type(found.model).__name__}, but a language model is needed here"
        )
    if found.tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer: put its tokenizer.json there")
    model = found.model.config
    length = min(_LENGTH, model.max_len)
    data = DataConfig(corpus="files", tokenizer=str(folder), length=length)
    config = LanguageConfig(Path(folder).name, model, objective=name, data=data)
    return config, found


def completed(config: LanguageConfig) -> LanguageConfig:
    """`config` with the sizes and the tokenizer of the folder `config.init`, if it names one.

    Dropout, dtype and the way fresh weights are drawn stay those of `config`. Raises `ConfigError`
    for a model that `config.objective` is not for.
    """
    if not config.init:
        return config
    folder = locate(config.init)
    theirs, found = read(folder)
    needed = objective(config).model
    if not isinstance(found.model, needed):
        raise ConfigError(
            f"{config.init} holds a {type(found.model).__name__}, but objective="
            f"{config.objective!r} learns a {needed.__name__}: choose a preset of the other one"
        )
    kept = {name: getattr(config.model, name) for name in UNSEEN}
    return replace(
        config,
        model=replace(theirs.model, **kept),
        data=replace(config.data, tokenizer=str(folder)),
    )


def begun(config: LanguageConfig, state: TrainState, devices: Devices) -> TrainState:
    """`state` with the parameters in the folder `config.init`, if it names one."""
    if not config.init:
        return state

    def fresh() -> Any:  # each a copy, because a step gives its state's memory away
        return devices.put(jax.tree.map(jnp.array, params))

    params = load_pretrained(config.init).params
    average = None if state.ema is None else fresh()
    return state.replace(params=fresh(), ema=average)
