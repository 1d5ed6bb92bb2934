"""Train a language model: `python -m experiments.language_modelling.train --preset NAME`.

The same command again resumes. Everything is kept in runs/language_modelling/NAME. This file is
meant to be copied: model, loss and step, then data, loop and score.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from jax.tree_util import Partial

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.checkpoint_selection import TrainResult, read_result
from experiments.harness.runs.loggers import Logger
from experiments.harness.training import build, initialization, session
from experiments.harness.training.fit import Cost, fit
from experiments.language_modelling import evaluate as evaluation
from experiments.language_modelling import init_from_pretrained
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.objectives import build_model, objective
from experiments.language_modelling.prepare import (
    Prepared,
    describe,
    prepare,
    text_digest,
    tokenizer_digest,
)
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from jaxformer.distributed import CompiledStep, Strategy
from jaxformer.nn.axes import parameter_axes
from jaxformer.text.data import all_rows
from jaxformer.training.train_step import TrainState, init_train_state

EXPERIMENT = "language_modelling"


def main(config: LanguageConfig) -> None:
    """The command."""
    train(config)


def make_init_and_step(
    config: LanguageConfig, model: nn.Module, batch: Any, devices: Strategy
) -> tuple[Callable[[], TrainState], CompiledStep]:
    """The function that makes the first state, and the compiled step on batches like `batch`.

    The step takes the gradient of the summed loss, divides it by the number of tokens and updates
    the parameters once. Its program depends on neither seed nor learning rate: runs share it.
    """
    training, task = config.training, objective(config)
    loss = build.build_loss(training, task.loss)(model, loss_chunk=training.loss_chunk)
    axes = devices.axes or parameter_axes(model)
    loss, optimizer = build.build_trained(config.optimizer, training, loss, axes)

    def init(rng: jax.Array, dropout_rng: jax.Array, *inputs: jax.Array) -> TrainState:
        params = build.init_params(model, rng, *inputs)
        params = build.with_adapters(params, rng, training, axes)
        return init_train_state(params, optimizer, dropout_rng, ema=training.ema_decay > 0)

    step = devices.step(
        loss,
        optimizer,
        grad_accumulation=training.parts_on(devices),
        ema_decay=training.ema_decay,
        gather_at=training.gather_at,
        gather_dtype=config.model.dtype,
    )
    rngs = jax.random.split(jax.random.key(training.seed))
    return Partial(init, *rngs, *(leaf[:2] for leaf in task.inputs(batch))), step


def train(
    config: LanguageConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: Callable[..., Any] = make_init_and_step,
    **values: Any,
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test text.

    `values` are of your own, by the names in `build.VALUES`, such as `block`; the run records them.
    `loggers` get all that is logged. Returns the run's folder and scores.
    """
    config = build.with_values(config, **values)
    scores, parent = known_scores(config), init_from_pretrained.with_pretrained_sizes
    with session.open_training(EXPERIMENT, config, scores, loggers, parent) as run:
        config, devices = run.config, run.devices
        data = prepare(config, run.folder)
        display.say(describe(data))
        batches = build.build_batches(config, data)
        config = replace(config, model=data.model)  # with the size of the vocabulary
        model = build_model(config)

        def batch(number: int) -> Any:
            parts = config.training.parts_on(devices)
            return devices.make_batch(partial(batches.batch, number), parts)

        def validate(params: Any) -> session.Evaluated:
            return evaluate(config, data, model, params)

        devices = devices.for_model(model)
        init, step = make_step(config, model, batches.batch(0, all_rows), devices)
        with display.phase("creating the model"):
            state = devices.init(init)
            state = init_from_pretrained.with_pretrained_params(config, state, devices)
        state = initialization.start(run, model, state, devices, batches.fingerprint)
        fit(
            step,
            state,
            batch,
            lambda state: validate(build.result_params(state, config.training)),
            run,
            cost=partial(cost, config),
            origin={"data": batches.fingerprint, "tokenizer": tokenizer_digest(run.folder)},
        )
        params = session.choose_weights(run, devices, validate, "validation_loss")
        score(run, LoadedRun(model, params, data.tokenizer, config=config), data)
    return read_result(run.folder)


def cost(config: LanguageConfig, batch: Any) -> Cost:
    """The predicted positions of a batch on its devices, and the FLOPs of a step on it."""
    return Cost(batch.loss_mask.size, objective(config).flops(config.model, batch))


def known_scores(config: LanguageConfig) -> tuple[str, ...]:
    """The scores of each evaluation; early stopping uses the first unless another is named."""
    bits = ("validation_bits_per_byte",) if config.objective == "causal" else ()
    return ("validation_loss", *bits)


def evaluate(
    config: LanguageConfig, data: Prepared, model: nn.Module, params: Any
) -> session.Evaluated:
    """The likelihood of the validation text."""
    loaded = LoadedRun(model, params, data.tokenizer, config=config)
    likelihood = evaluation.measure(loaded, data.validation)
    values = {"validation_loss": likelihood.loss}
    values["validation_bits_per_byte"] = likelihood.bits_per_byte
    scores = {name: values[name] for name in known_scores(config)}
    scores |= evaluation.custom_metrics(loaded, data.validation, likelihood)
    return session.Evaluated(scores)


def score(run: session.ExperimentRun, loaded: LoadedRun, data: Prepared) -> None:
    """Continues the prompts with the final weights, and writes their scores of the test text."""
    config, folder = loaded.config, run.folder
    evaluation.show_prompts(run.log, loaded)
    name = "validation" if data.test is None else "test"
    text = data.test or data.validation
    with display.phase(f"measuring the {name} text"):
        losses = evaluation.batch_losses(loaded, text)
        likelihood = evaluation.total(losses, text)
        scores = evaluation.scores_of(config, likelihood)
        scores |= evaluation.own_metrics(loaded, text, likelihood)
    facts = {"text": name, "text_sha256": text_digest(folder, name), "stride": config.data.seq_len}
    run.write_scores(facts | scores)
    if distributed.is_first():
        evaluation.write_losses(folder, name, losses)
    display.say(evaluation.describe_scores(name, config, likelihood, losses))
    files = {"samples/prompts.txt": "the prompts and what the model makes of them"}
    commands = [(f"{EXPERIMENT}.{name}",) for name in ("generate", "evaluate")]
    display.say("\n" + session.describe_folder(folder, files, commands))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
