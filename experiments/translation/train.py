"""Train a Transformer to translate: `python -m experiments.translation.train --preset NAME`.

The same command again resumes. Everything is kept in runs/translation/NAME.
"""

import sys
from contextlib import ExitStack
from typing import Any

import jax

from experiments import commands, runs
from experiments.profiling import profiled
from experiments.progress import Progress
from experiments.stopping import asked_to_stop
from experiments.translation import evaluation
from experiments.translation.evaluation import Standing
from experiments.translation.prepare import Prepared, describe, open_run, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.checkpoint import CheckpointError, Checkpoints
from jaxformer.losses import seq2seq_loss
from jaxformer.models import EncoderDecoder
from jaxformer.optimizer import make_optimizer
from jaxformer.tokenizers import PAD
from jaxformer.training import TrainState, init_state, make_train_step


def main(config: TranslationConfig) -> None:
    """Prepares the text if need be, trains, and scores the result on the test set."""
    evaluation.check_extras(config)
    run = open_run(config)
    prepared = prepare(config, run.folder)
    print(describe(prepared))
    keep = config.training.average + 1  # one may stem from an interruption
    with Checkpoints(run.folder / "checkpoints", keep=keep) as checkpoints:
        train(config, prepared, checkpoints, run)
        evaluation.finish(config, prepared, checkpoints, run.folder)
    run.close()


def train(
    config: TranslationConfig, prepared: Prepared, checkpoints: Checkpoints, run: runs.Run
) -> None:
    """Trains from the newest checkpoint, or from the start, to the last step."""
    training, batches, total = config.training, prepared.batches, config.optimizer.total_steps
    state, compiled = begin(config, prepared)
    step = profiled(compiled, run.folder / "profile") if config.profile else compiled
    standing = Standing()
    if checkpoints.steps():
        state, facts = checkpoints.restore(state)
        standing = _resumed(facts, batches.fingerprint)
    number = int(state.step)
    run.resume(number)
    print(f"{runs.count(state.params):,} parameters; from step {number} to {total}")
    with ExitStack() as stack:
        progress = Progress(total, run, log_every=training.log_every)
        stopping = stack.enter_context(asked_to_stop())
        stack.enter_context(progress)
        while number < total and not standing.tired(training.patience):
            batch = batches.batch(number)
            state, metrics = step(state, batch)
            number += 1
            progress.add(number, metrics, batch.target[:, 1:].size)
            if _due(number, training.evaluate_every):
                standing = evaluation.validate(config, prepared, state, standing, run)
            last = number == total or stopping() or standing.tired(training.patience)
            if last or _due(number, training.save_every):
                progress.settle()
                facts = {"standing": standing._asdict(), "data": batches.fingerprint}
                checkpoints.save(number, state, facts, standing.metric(number))
            if stopping():
                break
        checkpoints.wait()
    print(f"{compiled._cache_size()} programs compiled for {len(batches.buckets)} shapes of batch")


def begin(config: TranslationConfig, prepared: Prepared) -> tuple[TrainState, Any]:
    """The state before the first step, and the compiled step."""
    training = config.training
    model = EncoderDecoder(prepared.model)
    optimizer = make_optimizer(config.optimizer)
    loss = seq2seq_loss(model, pad=PAD, smoothing=training.smoothing)
    step = make_train_step(
        loss, optimizer, accumulation=training.accumulation, ema_decay=training.ema_decay
    )
    init_rng, rng = jax.random.split(jax.random.key(training.seed))
    batch = prepared.batches.batch(0)
    params = jax.jit(model.init)(init_rng, batch.source[:2], batch.target[:2, :-1])["params"]
    state = init_state(params, optimizer, rng, ema=training.ema_decay > 0)
    return state, jax.jit(step, donate_argnums=0)


def _resumed(facts: dict, fingerprint: str) -> Standing:
    if facts["data"] != fingerprint:
        raise CheckpointError(
            "the checkpoint was trained on other batches than these: the training text, the "
            "tokenizer or the bucket settings have changed; use another --name"
        )
    return Standing(**facts["standing"])


def _due(number: int, interval: int) -> bool:
    return interval > 0 and number % interval == 0


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(PRESETS, description=__doc__))))
