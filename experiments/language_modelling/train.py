"""Train a language model: `python -m experiments.language_modelling.train --preset NAME`.

The same command again resumes. Everything is kept in runs/language_modelling/NAME. This file is
meant to be copied: model, data, evaluation and score are here; the rest is in the harness.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from flax import linen as nn

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.language_modelling import scoring
from experiments.language_modelling.load_run import with_pretrained_sizes
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.prepare import (
    Prepared,
    describe,
    describe_passes,
    part_names,
    prepare,
    text_digest,
    tokenizer_digest,
)
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.prompts import show_prompts
from jaxformer.distributed import Strategy
from jaxformer.pretrained import Loaded
from jaxformer.text.data import Mixture

EXPERIMENT = "language_modelling"


def main(config: LanguageConfig) -> None:
    """The command."""
    train(config)


def make_step(
    config: LanguageConfig, model: nn.Module, batch: Any, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    objective = objective_of(config)
    loss = training.build_loss(config.training, objective.loss)(model)
    return training.gradient_step(config, model, loss, objective.inputs(batch), devices)


def train(
    config: LanguageConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: training.MakeStep = make_step,
    **values: Any,
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test text.

    `values` are of your own, by the names in `named_values.VALUES`, such as `block`; the run
    records them. `loggers` get all that is logged. Returns the run's folder and scores.
    """
    config = training.with_values(config, **values)
    scores = scoring.known_scores(config)
    with training.open_run(EXPERIMENT, config, scores, loggers, with_pretrained_sizes) as run:
        data = prepare(run.config, run.folder)
        display.say(describe(data, run.config))
        run = run.with_model(data.model)  # the size of its vocabulary
        model = training.build_model(run.config, contact=run.contact)
        task = training.Task(
            model=model,
            make_step=make_step,
            batches=training.build_batches(run.config, data),
            evaluate=partial(evaluate, model, data),
            cost=cost,
            origin={"tokenizer": tokenizer_digest(run.folder)},
        )
        # The first state, with the weights that the run starts from, and the compiled step.
        run, step, state = training.start(run, task)
        # The loop, from the newest checkpoint on: batch, step, log, evaluate, save.
        training.fit(run, step, state, task)
        # The mean of the last checkpoints, or the best one.
        params = training.choose_weights(run, task)
        score(model, data, run, params)
    return read_result(run.folder)


def cost(run: training.OpenRun, batch: Any) -> training.Cost:
    """The cost of a step on `batch`."""
    flops = objective_of(run.config).flops(run.config.model, batch)
    return training.Cost(batch.loss_mask.size, flops)


def evaluate(
    model: nn.Module, data: Prepared, run: training.OpenRun, params: Any, step: int
) -> training.EvaluationResult:
    """The likelihood of the validation text, or of each text of a mixture."""
    loaded = Loaded(model, params, data.tokenizer, config=run.config)
    return training.EvaluationResult(scoring.validation_scores(loaded, data, step))


def score(model: nn.Module, data: Prepared, run: training.OpenRun, params: Any) -> None:
    """Continues the prompts with the final weights, and writes their scores of the test text."""
    loaded = Loaded(model, params, data.tokenizer, config=run.config)
    show_prompts(run, loaded, data)
    name = "test" if data.test else "validation"
    texts = {"": data.test} if data.test else scoring.validation_texts(data)
    with display.phase(f"measuring the {name} text"):
        measured = scoring.measure(loaded, texts)
    digest = text_digest(run.folder, part_names(run.config.data, name))
    stride = run.config.data.seq_len
    run.write_scores({"text": name, "text_sha256": digest, "stride": stride} | measured.scores)
    scoring.write_losses(run.folder, name, measured.losses)
    display.say(scoring.describe_scores(name, run.config, measured))
    if isinstance(data.batches, Mixture):
        steps = run.config.optimizer.total_steps
        display.say("\n".join(describe_passes(data, data.batches, steps)))
    display.say("\n" + scoring.describe_run(run.folder))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
