"""Trains a Transformer in PyTorch: `python -m experiments.torch_reference.train_translation`.

Presets, text, batches and scores are those of `experiments.translation`.
"""

from dataclasses import replace
from typing import Any

from experiments.harness import cli
from experiments.harness.training.session import Evaluated, choose_weights, open_training
from experiments.torch_reference.torch_runs import (
    TorchEncoderDecoder,
    load_torch,
    torch_config,
    train_steps,
)
from experiments.translation.evaluate import check_extras
from experiments.translation.load_run import LoadedRun, build_model
from experiments.translation.prepare import prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import EXPERIMENT, SCORES, evaluate, score

_PRESETS = {name: PRESETS[name] for name in ("multi30k_tiny", "multi30k_base")}


def main(config: TranslationConfig) -> None:
    """Prepares the text, trains, and scores the result as a run of jaxformer is."""
    load_torch(config.training.seed)
    from experiments.torch_reference.transformer import Transformer

    config = torch_config(config, TorchEncoderDecoder)
    check_extras(config)
    with open_training(EXPERIMENT, config, SCORES) as run:
        data = prepare(config, run.folder)
        config = replace(config, model=data.model)
        model = build_model(config)

        def loaded(params: Any) -> LoadedRun:
            return LoadedRun(config, model, params, data.source_tokenizer, data.target_tokenizer)

        def validate(params: Any) -> Evaluated:
            beam = replace(config.search, beam_size=config.training.eval_beam_size)
            return evaluate(run, loaded(params), data, beam)

        def choose(params: Any) -> Evaluated:
            return evaluate(run, loaded(params), data, config.search)

        module = Transformer(config.model, config.training.label_smoothing)
        train_steps(config, data.batches, module, run, validate)
        score(run, loaded(choose_weights(run, run.devices, choose, "validation_bleu")), data)


if __name__ == "__main__":
    cli.start(main, _PRESETS, __doc__)
