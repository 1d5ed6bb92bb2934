"""Train a Transformer to translate: `python -m experiments.translation.train --preset NAME`.

The same command again resumes. Everything is kept in runs/translation/NAME.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack

import jax

from experiments import commands, machines, runs
from experiments.planning import peak_of, rows_and_length, seq2seq_flops
from experiments.profiling import profiled
from experiments.progress import Progress
from experiments.settings import choose_devices, tuned
from experiments.standing import due, resumed
from experiments.stopping import asked_to_stop
from experiments.translation import evaluation
from experiments.translation.prepare import Prepared, describe, open_run, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig
from jaxformer.data import PairBatch
from jaxformer.losses import seq2seq_loss
from jaxformer.models import EncoderDecoder
from jaxformer.optimizer import make_optimizer
from jaxformer.parallel import Devices, Program
from jaxformer.tokenizers import PAD
from jaxformer.training import TrainState, init_state


def main(config: TranslationConfig) -> None:
    """Prepares the text if need be, trains, and scores the result on the test set."""
    evaluation.check_extras(config)
    with machines.joined(config):
        tuning = tuned(config.runs, config.programs)
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
    config: TranslationConfig,
    prepared: Prepared,
    devices: Devices,
    checkpoints: Checkpoints,
    run: runs.Run,
) -> None:
    """Trains from the newest checkpoint, or from the start, to the last step."""
    training, batches, total = config.training, prepared.batches, config.optimizer.total_steps
    state, compiled = begin(config, prepared, devices)
    traced = config.profile and machines.is_first()
    step = profiled(compiled, run.folder / "profile") if traced else compiled
    state, standing = resumed(checkpoints, state, batches.fingerprint)
    number = int(state.step)
    run.resume(number)
    peak = peak_of(devices, prepared.model.dtype)
    print(f"{runs.count(state.params):,} parameters; from step {number} to {total}\n{peak}")
    with ExitStack() as stack:
        progress = Progress(total, run, log_every=training.log_every, peak=peak.total)
        stopping = stack.enter_context(asked_to_stop())
        stack.enter_context(progress)
        while number < total and not standing.tired(training.patience):
            batch = devices.place(batches.batch(number, devices.rows))
            state, metrics = step(state, batch)
            number += 1
            flops = flops_of(prepared.model, batch)
            progress.add(number, metrics, batch.target.size - batch.row.size, flops)
            if due(number, training.evaluate_every):
                standing = evaluation.validate(config, prepared, devices, state, standing, run)
            last = number == total or standing.tired(training.patience)
            regular = last or due(number, training.save_every)
            stop = stopping()
            if regular or stop:
                progress.settle()
                facts = {"standing": standing._asdict(), "data": batches.fingerprint}
                # Weights that only an interruption saved are none to choose at the end.
                metric = standing.metric_of(number) if regular else None
                checkpoints.save(number, state, facts, metric)
            if stop:
                break
        checkpoints.wait()
    print(f"{compiled.programs} programs compiled for {len(batches.buckets)} shapes of batch")


def flops_of(sizes: TransformerConfig, batch: PairBatch) -> int:
    """FLOPs of a step on a placed batch by the equations of a model of `sizes`."""
    return seq2seq_flops(sizes, *rows_and_length(batch.source), batch.target.shape[-1] - 1)


def begin(
    config: TranslationConfig, prepared: Prepared, devices: Devices
) -> tuple[TrainState, Program]:
    """The state before the first step, and the compiled step, on `devices`."""
    batch = prepared.batches.batch(0)
    make_state, step = assemble(config, prepared.model, batch, devices)
    return devices.init(make_state), step


def assemble(
    config: TranslationConfig, sizes: TransformerConfig, batch: PairBatch, devices: Devices
) -> tuple[Callable[[], TrainState], Program]:
    """What makes the first state of a model of `sizes`, and its step on batches like `batch`."""
    training = config.training
    model = EncoderDecoder(sizes, training.attention, training.block)
    optimizer = make_optimizer(config.optimizer)
    init_rng, rng = jax.random.split(jax.random.key(training.seed))

    def make_state() -> TrainState:
        params = model.init(init_rng, batch.source[:2], batch.target[:2, :-1])["params"]
        return init_state(params, optimizer, rng, ema=training.ema_decay > 0)

    step = devices.step(
        seq2seq_loss(model, pad=PAD, smoothing=training.smoothing, head=training.head),
        optimizer,
        accumulation=training.accumulation,
        ema_decay=training.ema_decay,
    )
    return make_state, step


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(PRESETS, description=__doc__))))
