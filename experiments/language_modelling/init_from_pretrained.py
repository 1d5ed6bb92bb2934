"""Pretrained weights in the format of `transformers`, used as a run or as its start."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments.language_modelling.objectives import objective
from experiments.language_modelling.presets import DataConfig, LanguageConfig
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.nn.stacking import stack_blocks
from jaxformer.pretrained import Loaded, load_pretrained
from jaxformer.pretrained.hf_folder import locate
from jaxformer.pretrained.model_specs import TRAINING_ONLY
from jaxformer.training.train_step import TrainState

_LENGTH = 256
_OBJECTIVES: dict[type, Literal["causal", "masked"]] = {
    DecoderOnly: "causal",
    MaskedLanguageModel: "masked",
    EncoderOnly: "masked",
}


def read(folder: str | Path) -> tuple[LanguageConfig, Loaded]:
    """The model, weights and tokenizer in the folder, and a configuration that describes them.

    Raises `ConfigError` for a model that is not a language model, and for one without a tokenizer.
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
    data = DataConfig(corpus="files", tokenizer=str(folder), seq_len=length)
    config = LanguageConfig(Path(folder).name, model, objective=name, data=data)
    return config, found


def with_pretrained_sizes(config: LanguageConfig) -> LanguageConfig:
    """`config` with the sizes and the tokenizer of the folder `config.init_from`, if it names one.

    Dropout, dtype and initializer stay those of `config`. Raises `ConfigError`
    for a model of another objective than `config.objective`.
    """
    if not config.init_from:
        return config
    folder = locate(config.init_from)
    pretrained, found = read(folder)
    needed = objective(config).model
    if not isinstance(found.model, needed):
        raise ConfigError(
            f"{config.init_from} holds a {type(found.model).__name__}, but objective="
            f"{config.objective!r} learns a {needed.__name__}: choose a preset of the other "
            "objective"
        )
    kept = {name: getattr(config.model, name) for name in TRAINING_ONLY}
    return replace(
        config,
        model=replace(pretrained.model, **kept),
        data=replace(config.data, tokenizer=str(folder)),
    )


def with_pretrained_params(
    config: LanguageConfig, state: TrainState, devices: Strategy
) -> TrainState:
    """`state` with the parameters in the folder `config.init_from`, if it names one."""
    if not config.init_from:
        return state

    def fresh() -> Any:  # a copy, because a step donates its state's buffers
        return devices.shard_state(jax.tree.map(jnp.array, params))

    params: Any = load_pretrained(config.init_from).params
    params = stack_blocks(params) if config.model.scan_layers else params
    average = None if state.ema is None else fresh()
    return state.replace(params=fresh(), ema=average)
