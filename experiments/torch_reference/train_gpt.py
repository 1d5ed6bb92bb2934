"""Trains a GPT in PyTorch: `python -m experiments.torch_reference.train_gpt --preset NAME`.

Presets, text, batches and scores are those of `experiments.language_modelling`.
"""

from dataclasses import replace
from typing import Any

from experiments.harness import cli
from experiments.harness.training.session import Evaluated, choose_weights, open_training
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.objectives import build_model
from experiments.language_modelling.prepare import prepare, tokenizer_digest
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import EXPERIMENT, evaluate, known_scores, score
from experiments.torch_reference.torch_runs import (
    TorchDecoderOnly,
    load_torch,
    torch_config,
    train_steps,
)
from jaxformer.errors import ConfigError

_PRESETS = {name: PRESETS[name] for name in ("shakespeare_char_cpu", "shakespeare_char")}


def main(config: LanguageConfig) -> None:
    """Prepares the text, trains, and measures the result as a run of jaxformer is."""
    _check(config)
    load_torch(config.training.seed)
    from experiments.torch_reference.gpt import GPT

    config = torch_config(config, TorchDecoderOnly)
    with open_training(EXPERIMENT, config, known_scores(config)) as run:
        data = prepare(config, run.folder)
        config = replace(config, model=data.model)
        model = build_model(config)

        def validate(params: Any) -> Evaluated:
            return evaluate(config, data, model, params)

        digest = tokenizer_digest(run.folder)
        train_steps(config, data.batches, GPT(config.model), run, validate, tokenizer=digest)
        params = choose_weights(run, run.devices, validate, "validation_loss")
        score(run, LoadedRun(config, model, params, data.tokenizer), data)


def _check(config: LanguageConfig) -> None:
    if config.objective != "causal" or config.data.isolate_documents:
        raise ConfigError(
            f"objective={config.objective!r} with data.isolate_documents="
            f"{config.data.isolate_documents} is not supported by the PyTorch reference: "
            "give objective='causal' and data.isolate_documents=False"
        )


if __name__ == "__main__":
    cli.start(main, _PRESETS, __doc__)
