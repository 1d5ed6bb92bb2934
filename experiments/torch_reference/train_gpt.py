"""Trains a GPT in PyTorch: `python -m experiments.torch_reference.train_gpt --preset NAME`.

Presets, text and batches are those of `experiments.language_modelling`.
"""

import time
from typing import Any

from experiments.harness import cli, run_folder
from experiments.harness.metric_logger import Progress
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import prepare
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

_PRESETS = {name: PRESETS[name] for name in ("shakespeare_char_cpu", "shakespeare_char")}


def main(config: LanguageConfig) -> None:
    """Prepares the text, trains, and prints the validation loss."""
    torch = optional_dependencies.load("torch")
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.trainer import Trainer

    _check(config)
    run = run_folder.open_run(config.runs, "torch_reference", config.name, config)
    run.resume(0)
    prepared = prepare(config, run.folder)
    torch.manual_seed(config.training.seed)
    model = GPT(prepared.model)
    trainer = Trainer(model, config.optimizer)
    total = config.optimizer.total_steps
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {total} steps")
    begin = time.monotonic()
    with Progress(total, run, log_every=config.training.log_every) as progress:
        for number in range(1, total + 1):
            batch: Any = prepared.batches.batch(number - 1)
            progress.add(number, trainer.step(batch), batch.loss_mask.size)
    seconds = time.monotonic() - begin
    held_out = objective(config).iterate_once(
        prepared.validation.tokens, prepared.tokenizer, config, config.data.seq_len
    )
    nats, tokens = trainer.evaluate(held_out)
    run.log(total, validation_loss=nats / tokens, seconds=seconds)
    run.close()
    print(
        f"validation loss {nats / tokens:.4f} nats per token ({tokens:,} tokens); {seconds:.0f} s"
    )


def _check(config: LanguageConfig) -> None:
    if config.objective != "causal" or config.data.isolate_documents:
        raise ConfigError(
            f"objective={config.objective!r} with data.isolate_documents="
            f"{config.data.isolate_documents} is not supported by the PyTorch reference: "
            "give objective='causal' and data.isolate_documents=False"
        )


if __name__ == "__main__":
    cli.start(main, _PRESETS, __doc__)
