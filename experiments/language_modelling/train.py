"""Train a language model: `python -m experiments.language_modelling.train --preset NAME`.

The same command again resumes. Everything is kept in runs/language_modelling/NAME.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax

from experiments import commands, machines, runs
from experiments.language_modelling import evaluation
from experiments.language_modelling.borrowed import begun, completed
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import (
    Prepared,
    describe,
    open_run,
    prepare,
    tokenizer_digest,
)
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.planning import peak_of
from experiments.profiling import profiled
from experiments.progress import Progress
from experiments.settings import choose_devices, tuned
from experiments.standing import due, resumed
from experiments.stopping import asked_to_stop
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig
from jaxformer.optimizer import make_optimizer
from jaxformer.parallel import Devices, Program
from jaxformer.training import TrainState, init_state


def main(config: LanguageConfig) -> None:
    """Prepares the text if need be, trains, and shows what the model has learned."""
    with machines.joined(config):
        tuning = tuned(config.runs, config.programs)
        config = completed(config)
        devices = choose_devices(config.parallel, config.mesh, tuning.options)
        run = open_run(config)
        prepared = prepare(config, run.folder)
        print(describe(prepared))
        keep = config.training.average + 1  # one may stem from an interruption
        with Checkpoints(run.folder / "checkpoints", keep=keep, patience=3) as checkpoints:
            train(config, prepared, devices, checkpoints, run)
            evaluation.finish(config, prepared, checkpoints, run.folder)
        run.close()


def train(
    config: LanguageConfig,
    prepared: Prepared,
    devices: Devices,
    checkpoints: Checkpoints,
    run: runs.Run,
) -> None:
    """Trains from the newest checkpoint, or from the start, to the last step."""
    training, batches, total = config.training, prepared.batches, config.optimizer.total_steps
    flops = objective(config).flops
    state, step = begin(config, prepared, devices)
    if config.profile and machines.is_first():
        step = profiled(step, run.folder / "profile")
    state, standing = resumed(checkpoints, state, batches.fingerprint)
    origin = {"data": batches.fingerprint, "tokenizer": tokenizer_digest(run.folder)}
    number = int(state.step)
    run.resume(number)
    sizes, peak = prepared.model, peak_of(devices, prepared.model.dtype)
    print(f"{runs.count(state.params):,} parameters; from step {number} to {total}\n{peak}")
    with ExitStack() as stack:
        progress = Progress(total, run, log_every=training.log_every, peak=peak.total)
        stopping = stack.enter_context(asked_to_stop())
        stack.enter_context(progress)
        while number < total and not standing.tired(training.patience):
            batch = devices.place(batches.batch(number, devices.rows))
            state, metrics = step(state, batch)
            number += 1
            progress.add(number, metrics, batch.valid.size, flops(sizes, batch))
            if due(number, training.evaluate_every):
                standing = evaluation.validate(config, prepared, devices, state, standing, run)
            last = number == total or standing.tired(training.patience)
            regular = last or due(number, training.save_every)
            stop = stopping()
            if regular or stop:
                progress.settle()
                facts = {"standing": standing._asdict(), **origin}
                # Weights that only an interruption saved are none to choose at the end.
                metric = standing.metric_of(number) if regular else None
                checkpoints.save(number, state, facts, metric)
            if stop:
                break
        checkpoints.wait()


def begin(
    config: LanguageConfig, prepared: Prepared, devices: Devices
) -> tuple[TrainState, Program]:
    """The state before the first step, and the compiled step, on `devices`."""
    batch = prepared.batches.batch(0)
    make_state, step = assemble(config, prepared.model, batch, devices)
    return begun(config, devices.init(make_state), devices), step


def assemble(
    config: LanguageConfig, sizes: TransformerConfig, batch: Any, devices: Devices
) -> tuple[Callable[[], TrainState], Program]:
    """What makes the first state of a model of `sizes`, and its step on batches like `batch`."""
    training, learned = config.training, objective(config)
    model = learned.model(sizes, training.attention, training.block)
    optimizer = make_optimizer(config.optimizer)
    init_rng, rng = jax.random.split(jax.random.key(training.seed))
    inputs = [leaf[:2] for leaf in learned.inputs(batch)]

    def make_state() -> TrainState:
        params = model.init(init_rng, *inputs)["params"]
        return init_state(params, optimizer, rng, ema=training.ema_decay > 0)

    step = devices.step(
        learned.loss(model, head=training.head),
        optimizer,
        accumulation=training.accumulation,
        ema_decay=training.ema_decay,
    )
    return make_state, step


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(PRESETS, description=__doc__))))
