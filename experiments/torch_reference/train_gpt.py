"""Trains a GPT in PyTorch: `python -m experiments.torch_reference.train_gpt --preset NAME`.

Presets, text, batches and scores are those of `experiments.language_modelling`.
"""

from typing import Any

from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.harness.training.early_stopping import EarlyStopping
from experiments.harness.training.metric_logger import Progress
from experiments.harness.training.training_config import record_environment, started
from experiments.language_modelling.load_run import LoadedRun, build_model
from experiments.language_modelling.prepare import prepare, tokenizer_digest
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import finish, validate
from experiments.torch_reference.torch_runs import (
    TorchDecoderOnly,
    checkpoints_of,
    load_torch,
    torch_config,
    train_steps,
)
from jaxformer.errors import ConfigError

_PRESETS = {name: PRESETS[name] for name in ("shakespeare_char_cpu", "shakespeare_char")}


def main(config: LanguageConfig) -> None:
    """Prepares the text, trains, and measures the result as a run of jaxformer is."""
    _check(config)
    torch = load_torch(config.training.seed)
    from experiments.torch_reference.gpt import GPT

    config = torch_config(config, TorchDecoderOnly)
    with started(config) as (_, setup):
        run = run_folder.open_run(config.runs, "language_modelling", config.name, config)
        record_environment(run, config, setup=setup, torch=torch.__version__)
        prepared = prepare(config, run.folder)
        model = build_model(config, prepared.model)

        def evaluate(
            params: Any, step: int, stopping: EarlyStopping, progress: Progress
        ) -> EarlyStopping:
            loaded = LoadedRun(config, model, params, prepared.tokenizer)
            return validate(loaded, prepared, step, stopping, run, progress)

        with checkpoints_of(config, run) as checkpoints:
            module = GPT(prepared.model)
            train_steps(
                config,
                prepared.model,
                prepared,
                module,
                checkpoints,
                run,
                evaluate,
                tokenizer=tokenizer_digest(run.folder),
            )
            finish(config, prepared, model, checkpoints, run)
        run.close()


def _check(config: LanguageConfig) -> None:
    if config.objective != "causal" or config.data.isolate_documents:
        raise ConfigError(
            f"objective={config.objective!r} with data.isolate_documents="
            f"{config.data.isolate_documents} is not supported by the PyTorch reference: "
            "give objective='causal' and data.isolate_documents=False"
        )


if __name__ == "__main__":
    cli.start(main, _PRESETS, __doc__)
