"""Runs that PyTorch trains, in folders that all commands read: the weights are converted."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from experiments.harness.cli import name_of
from experiments.harness.training.early_stopping import EarlyStopping, due
from experiments.harness.training.fit import log_evaluation
from experiments.harness.training.progress import Progress
from experiments.harness.training.session import Evaluated, ExperimentRun
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.training.train_step import init_train_state


class TorchEncoderDecoder(EncoderDecoder):
    """`EncoderDecoder`, by a name that tells the runs of PyTorch from others in a comparison."""


class TorchDecoderOnly(DecoderOnly):
    """`DecoderOnly`, by a name that tells the runs of PyTorch from others in a comparison."""


def torch_config(config: Any, model: type[EncoderDecoder | DecoderOnly]) -> Any:
    """`config` of a run in RUNS/torch_reference whose model is called `model`.

    Raises `ConfigError` for options that only the steps of jaxformer have.
    """
    plain = type(config.training)()
    for name in ("loss", "r_drop", "z_loss", "ema_decay"):
        given, default = getattr(config.training, name), getattr(plain, name)
        if given != default:
            raise ConfigError(
                f"training.{name}={given!r} is not supported by the PyTorch reference: leave it out"
            )
    training = replace(config.training, model=name_of(model, "model"))
    return replace(config, training=training, runs=str(Path(config.runs, "torch_reference")))


def train_steps(
    config: Any,
    batches: Any,
    module: Any,
    run: ExperimentRun,
    validate: Callable[[Any], Evaluated],
    **origin: str,
) -> None:
    """Trains the torch `module` on the `batches` that a run of jaxformer with `config` has.

    Checkpoints note `origin` beside the digest of the batches. Raises `ConfigError` for a run that
    has checkpoints.
    """
    from experiments.torch_reference.trainer import Trainer
    from experiments.torch_reference.weights import params_of

    training, total, checkpoints = config.training, config.optimizer.total_steps, run.checkpoints
    if checkpoints.newest_step() is not None:
        raise ConfigError(
            f"{run.folder} has been trained, and a run of PyTorch is not resumed: give another "
            "--name, or remove the folder"
        )
    trainer = Trainer(module, config.optimizer)
    params = partial(params_of, module, config.model)
    parameters = sum(p.numel() for p in module.parameters())
    print(f"{parameters:,} parameters; {total} steps of PyTorch")

    stopping = EarlyStopping()
    origin |= {"data": batches.fingerprint}
    run.log.resume(0)
    log_every, pause_every = training.log_every, training.evaluate_every
    with Progress(total, run.log, log_every=log_every, pause_every=pause_every) as progress:
        for number in range(1, total + 1):
            batch = batches.batch(number - 1)
            progress.add(number, trainer.step(batch), _positions(batch))
            if due(number, training.evaluate_every):
                with progress.pause("evaluating"):
                    evaluated = validate(params())
                stopping = log_evaluation(run, progress, number, evaluated, stopping)
            if number == total or due(number, training.save_every):
                state = init_train_state(params(), optax.identity(), jax.random.key(0))
                metadata = {"early_stopping": stopping._asdict(), "regular": True, **origin}
                step = np.asarray(number, np.int32)
                checkpoints.save(
                    number, state.replace(step=step), metadata, stopping.metric_at(number)
                )
    checkpoints.wait()


def _positions(batch: Any) -> int:
    """The target positions of a batch, padding included."""
    if hasattr(batch, "target"):
        return batch.target.size - len(batch.target)
    return batch.loss_mask.size


def load_torch(seed: int) -> Any:
    """torch, with its random state set to `seed`; `MissingExtra` where it is not installed."""
    torch = optional_dependencies.load("torch")
    torch.manual_seed(seed)
    return torch
