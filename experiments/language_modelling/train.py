"""Train a language model: `python -m experiments.language_modelling.train --preset NAME`.

The same command again resumes. Everything is kept in runs/language_modelling/NAME. This file is
meant to be copied: model, data, evaluation and score are here; the rest is in the harness.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from flax import linen as nn

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.language_modelling import evaluate as evaluation
from experiments.language_modelling.load_run import with_pretrained_sizes
from experiments.language_modelling.objectives import objective
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
from jaxformer.distributed import Strategy
from jaxformer.pretrained import Loaded
from jaxformer.text.data import Mixture

EXPERIMENT = "language_modelling"


def main(config: LanguageConfig) -> None:
    """The command."""
    train(config)


def make_init_and_step(
    config: LanguageConfig, model: nn.Module, batch: Any, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    task, chunk = objective(config), config.training.loss_chunk
    loss = training.build_loss(config.training, task.loss)(model, loss_chunk=chunk)
    return training.init_and_step(config, model, loss, task.inputs(batch), devices)


def train(
    config: LanguageConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: Callable[..., Any] = make_init_and_step,
    **values: Any,
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test text.

    `values` are of your own, by the names in `named_values.VALUES`, such as `block`; the run
    records them. `loggers` get all that is logged. Returns the run's folder and scores.
    """
    config = training.with_values(config, **values)
    scores = known_scores(config)
    with training.open_run(EXPERIMENT, config, scores, loggers, with_pretrained_sizes) as run:
        data = prepare(run.config, run.folder)
        display.say(describe(data, run.config))
        run = replace(run, config=replace(run.config, model=data.model))  # with its vocabulary
        model = training.build_model(run.config, contact=run.contact)
        loaded = Loaded(model, None, data.tokenizer, config=run.config)
        flops = objective(run.config).flops
        task = training.Task(
            model=model,
            make_step=make_step,
            batches=training.build_batches(run.config, data),
            evaluate=lambda x, step: evaluate(replace(loaded, params=x), data, step),
            cost=lambda x: training.Cost(x.loss_mask.size, flops(run.config.model, x)),
            origin={"tokenizer": tokenizer_digest(run.folder)},
        )
        run, state, step = training.start(run, task)
        loaded = replace(loaded, config=run.config)  # with the parts that fit a GPU
        training.fit(run, step, state, task)
        params = training.choose_weights(run, task)
        score(run, replace(loaded, params=params), data)
    return read_result(run.folder)


def known_scores(config: LanguageConfig) -> tuple[str, ...]:
    """The scores of each evaluation; early stopping uses the first unless another is named."""
    bits = ("validation_bits_per_byte",) if config.objective == "causal" else ()
    return ("validation_loss", *bits)


def evaluate(loaded: Loaded, data: Prepared, step: int) -> training.EvaluationResult:
    """The likelihood of the validation text; of a mixture also each text's loss, and how many times
    it has been read."""
    texts = evaluation.validation_texts(data)
    likelihoods = {name: evaluation.measure(loaded, text) for name, text in texts.items()}
    whole = evaluation.together(likelihoods.values())
    names = [name.removeprefix("validation_") for name in known_scores(loaded.config)]
    scores = {f"validation_{name}": getattr(whole, name) for name in names}
    for name, text in texts.items():
        own = evaluation.user_loss_metrics(loaded, text, likelihoods[name])
        if data.mixture:
            own |= {"validation_loss": likelihoods[name].loss}
            own = {
                f"validation_{name}.{metric.removeprefix('validation_')}": value
                for metric, value in own.items()
            }
        scores |= own
    if isinstance(data.batches, Mixture) and step:
        passes = data.batches.passes(step)
        scores |= {f"{name}.passes": value for name, value in passes.items()}
    return training.EvaluationResult(scores)


def score(run: training.OpenRun, loaded: Loaded, data: Prepared) -> None:
    """Continues the prompts with the final weights, and writes their scores of the test text."""
    evaluation.show_prompts(run, loaded, data)
    name = "test" if data.test else "validation"
    texts = {"": data.test} if data.test else evaluation.validation_texts(data)
    with display.phase(f"measuring the {name} text"):
        measured = evaluation.measure_texts(loaded, texts)
    digest = text_digest(run.folder, part_names(run.config.data, name))
    facts = {"text": name, "text_sha256": digest, "stride": run.config.data.seq_len}
    run.write_scores(facts | measured.scores)
    if distributed.is_first():
        evaluation.write_losses(run.folder, name, measured.losses)
    likelihood = measured.likelihood
    display.say(evaluation.describe_scores(name, run.config, likelihood, measured.losses))
    if isinstance(data.batches, Mixture):
        steps = run.config.optimizer.total_steps
        display.say("\n".join(describe_passes(data, data.batches, steps)))
    display.say("\n" + evaluation.describe_run(run.folder))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
