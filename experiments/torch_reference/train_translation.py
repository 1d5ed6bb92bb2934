"""Trains a Transformer in PyTorch: `python -m experiments.torch_reference.train_translation`.

`experiments.translation.train` with another step.
"""

from typing import Any

from experiments.harness import cli
from experiments.torch_reference.torch_runs import (
    TorchEncoderDecoder,
    make_torch_step,
    torch_config,
)
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import train


def main(config: TranslationConfig) -> None:
    """Prepares the text, trains, and scores the result as a run of jaxformer is."""
    train(torch_config(config, TorchEncoderDecoder), make_step=make_torch_step(_module))


def _module(config: TranslationConfig) -> Any:
    from experiments.torch_reference.transformer import Transformer

    return Transformer(config.model, config.training.label_smoothing)


if __name__ == "__main__":
    names = ("multi30k_tiny", "multi30k_base")
    cli.start(main, {name: PRESETS[name] for name in names}, __doc__)
