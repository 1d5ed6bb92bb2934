"""Trains a GPT in PyTorch: `python -m experiments.torch_reference.train_gpt --preset NAME`.

`experiments.language_modelling.train` with another step.
"""

from typing import Any

from experiments.harness import cli
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import train
from experiments.torch_reference.torch_runs import TorchDecoderOnly, make_torch_step, torch_config
from jaxformer.errors import ConfigError


def main(config: LanguageConfig) -> None:
    """Prepares the text, trains, and measures the result as a run of jaxformer is."""
    if config.objective != "causal" or config.data.isolate_documents:
        raise ConfigError(
            f"objective={config.objective!r} with data.isolate_documents="
            f"{config.data.isolate_documents} is not supported by the PyTorch reference: "
            "give objective='causal' and data.isolate_documents=False"
        )
    train(torch_config(config, TorchDecoderOnly), make_step=make_torch_step(_module))


def _module(config: LanguageConfig) -> Any:
    from experiments.torch_reference.gpt import GPT

    return GPT(config.model)


if __name__ == "__main__":
    names = ("shakespeare_char_cpu", "shakespeare_char")
    cli.start(main, {name: PRESETS[name] for name in names}, __doc__)
