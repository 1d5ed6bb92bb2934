"""Trains a Transformer in PyTorch: `python -m experiments.torch_reference.train_translation`.

Presets, text, batches and scores are those of `experiments.translation`.
"""

from typing import Any

from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.harness.training.early_stopping import EarlyStopping
from experiments.harness.training.metric_logger import Progress
from experiments.harness.training.training_config import record_environment, started
from experiments.torch_reference.torch_runs import (
    TorchEncoderDecoder,
    checkpoints_of,
    load_torch,
    torch_config,
    train_steps,
)
from experiments.translation.evaluate import check_extras
from experiments.translation.load_run import build_model
from experiments.translation.prepare import prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import finish, validate, with_params

_PRESETS = {name: PRESETS[name] for name in ("multi30k_tiny", "multi30k_base")}


def main(config: TranslationConfig) -> None:
    """Prepares the text, trains, and scores the result as a run of jaxformer is."""
    torch = load_torch(config.training.seed)
    from experiments.torch_reference.transformer import Transformer

    config = torch_config(config, TorchEncoderDecoder)
    check_extras(config)
    with started(config) as (_, setup):
        run = run_folder.open_run(config.runs, "translation", config.name, config)
        record_environment(run, config, setup=setup, torch=torch.__version__)
        prepared = prepare(config, run.folder)
        model = build_model(config, prepared.model)

        def evaluate(
            params: Any, step: int, stopping: EarlyStopping, progress: Progress
        ) -> EarlyStopping:
            loaded = with_params(config, prepared, model, params)
            return validate(loaded, prepared, step, stopping, run, progress)

        with checkpoints_of(config, run) as checkpoints:
            module = Transformer(prepared.model, config.training.label_smoothing)
            train_steps(config, prepared.model, prepared, module, checkpoints, run, evaluate)
            finish(config, prepared, model, checkpoints, run)
        run.close()


if __name__ == "__main__":
    cli.start(main, _PRESETS, __doc__)
