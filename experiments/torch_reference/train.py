"""Trains in PyTorch: `python -m experiments.torch_reference.train --preset NAME`.

The trainings of `experiments.language_modelling` and `experiments.translation` with another step,
whose weights are converted, so that all else of a run is the same code.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.harness import cli
from experiments.language_modelling import train as language_modelling
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.language_modelling.presets import LanguageConfig
from experiments.translation import train as translation
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from experiments.translation.presets import TranslationConfig
from jaxformer import optional_dependencies
from jaxformer.config import name_of
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.training.train_step import TrainState, init_train_state

PRESETS: dict[str, LanguageConfig | TranslationConfig] = {
    **{name: LANGUAGE_PRESETS[name] for name in ("shakespeare_char_cpu", "shakespeare_char")},
    **{name: TRANSLATION_PRESETS[name] for name in ("multi30k_tiny", "multi30k_base")},
}
_REFUSED = ("loss", "z_loss", "balance", "ema_decay")


class TorchEncoderDecoder(EncoderDecoder):
    """`EncoderDecoder`, by a name that tells the runs of PyTorch from others in a comparison."""


class TorchDecoderOnly(DecoderOnly):
    """`DecoderOnly`, by a name that tells the runs of PyTorch from others in a comparison."""


def main(config: LanguageConfig | TranslationConfig) -> None:
    """Prepares the text, trains, and scores the result as a run of jaxformer is."""
    if isinstance(config, TranslationConfig):
        named = torch_config(config, TorchEncoderDecoder)
        translation.train(named, make_step=make_torch_step(_transformer))
        return
    if config.objective != "causal" or config.data.isolate_documents:
        raise ConfigError(
            f"objective={config.objective!r} with data.isolate_documents="
            f"{config.data.isolate_documents} is not supported by the PyTorch reference: "
            "give objective='causal' and data.isolate_documents=False"
        )
    named = torch_config(config, TorchDecoderOnly)
    language_modelling.train(named, make_step=make_torch_step(_gpt))


def _transformer(config: TranslationConfig) -> Any:
    from experiments.torch_reference.transformer import Transformer

    return Transformer(config.model, config.training.label_smoothing)


def _gpt(config: LanguageConfig) -> Any:
    from experiments.torch_reference.gpt import GPT

    return GPT(config.model)


def torch_config(config: Any, model: type[EncoderDecoder | DecoderOnly]) -> Any:
    """`config` of a run in RUNS/torch_reference whose model is called `model`.

    Raises `ConfigError` for options that only the steps of jaxformer have, `MissingExtra` without
    torch.
    """
    optional_dependencies.load("torch")
    defaults = type(config.training)()
    settings = {
        f"training.{name}": getattr(config.training, name)
        for name in _REFUSED
        if getattr(config.training, name, "") not in ("", getattr(defaults, name, ""))
    }
    settings |= {"init_from": config.init_from, "continue_from": config.continue_from}
    for name, value in settings.items():
        if value != "":
            raise ConfigError(
                f"{name}={value!r} is not supported by the PyTorch reference: leave it out"
            )
    training = replace(config.training, model=name_of(model, "model"))
    return replace(config, training=training, runs=str(Path(config.runs, "torch_reference")))


def make_torch_step(make_module: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """The `make_step` of a training whose steps the torch module `make_module(config)` takes.

    The state holds the module's weights after each step; a run is not resumed, because it does not
    hold PyTorch's optimizer.
    """

    def make_step(config: Any, model: Any, batch: Any, devices: Any) -> tuple[Any, Any]:
        import torch

        from experiments.torch_reference import weights
        from experiments.torch_reference.trainer import Trainer

        torch.manual_seed(config.training.seed)
        trainer = Trainer(make_module(config), config.optimizer)
        shapes, done = weights.shapes_of(config.model), itertools.count()

        def init() -> TrainState:  # the first step fills in the weights
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return init_train_state(zeros, optax.identity(), jax.random.key(0))

        def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, float]]:
            if int(state.step) != next(done):
                raise ConfigError(
                    f"{config.name} has been trained, and a run of PyTorch is not resumed: give "
                    "another --name, or remove its folder"
                )
            metrics = trainer.step(jax.tree.map(np.asarray, batch))
            params = weights.params_of(trainer.model, config.model)
            return state.replace(step=state.step + 1, params=params), metrics

        return init, step

    return make_step


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
