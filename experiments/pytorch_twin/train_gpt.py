"""Train a preset's model in PyTorch: `python -m experiments.pytorch_twin.train_gpt --preset NAME`.

Presets, text and batches are those of `experiments.language_modelling`, number for number.
"""

import sys
import time

from experiments import commands, runs
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import prepare
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.progress import Progress
from jaxformer import extras
from jaxformer.config import ConfigError

_PRESETS = {name: PRESETS[name] for name in ("shakespeare_char_cpu", "shakespeare_char")}


def main(config: LanguageConfig) -> None:
    """Prepares the text if need be, trains, and prints the loss of the whole validation part."""
    torch = extras.load("torch")
    from experiments.pytorch_twin.gpt import GPT
    from experiments.pytorch_twin.trainer import Trainer

    _check(config)
    run = runs.open_run(config.runs, "pytorch_twin", config.name, config)
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
            batch = prepared.batches.batch(number - 1)
            progress.add(number, trainer.step(batch), batch.valid.size)
    seconds = time.monotonic() - begin
    held_out = objective(config).cover(
        prepared.validation.tokens, prepared.tokenizer, config, config.data.length
    )
    nats, tokens = trainer.evaluate(held_out)
    run.log(total, validation_loss=nats / tokens, seconds=seconds)
    run.close()
    print(f"validation loss {nats / tokens:.4f} nats a token over {tokens:,}; {seconds:.0f} s")


def _check(config: LanguageConfig) -> None:
    if config.objective != "causal" or config.data.separate:
        raise ConfigError(
            f"objective={config.objective!r} and data.separate={config.data.separate}, but the "
            "twin learns objective='causal' of one long text, data.separate=False"
        )


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(_PRESETS, description=__doc__))))
