"""Train a Transformer to translate: `python -m experiments.translation.train --preset NAME`.

The same command again resumes. Everything is kept in runs/translation/NAME. This file is meant to
be copied: model and loss, data, evaluation and score are here; the rest is in the harness.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.training.flops import seq2seq_cost
from experiments.translation import samples, score_report, scoring, telling_scores
from experiments.translation.language_codes import describe_word_counting
from experiments.translation.prepare import Prepared, describe, prepare, with_start
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.distributed import Strategy
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import Loaded
from jaxformer.text import tokenizers
from jaxformer.text.data import PairBatch
from jaxformer.training.losses import seq2seq_loss

EXPERIMENT = "translation"
SCORES = ("validation_bleu", "validation_chrf", "validation_exact", "validation_loss")
"""The scores of each evaluation; early stopping uses the first that tells something of the
validation text, unless another is named."""


def main(config: TranslationConfig) -> None:
    """The command."""
    train(config)


def make_step(
    config: TranslationConfig, model: EncoderDecoder, batch: PairBatch, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`."""
    options = config.training
    make_loss = training.build_loss(options, seq2seq_loss, label_smoothing=options.label_smoothing)
    loss = make_loss(model, pad=config.translation.pad)
    inputs = batch.source, batch.target[:, :-1]
    return training.gradient_step(config, model, loss, inputs, devices)


def train(
    config: TranslationConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: training.MakeStep = make_step,
    **values: Any,
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test set.

    `values` are of your own, by the names in `named_values.VALUES`, such as `block`; the run
    records them. `loggers` get all that is logged. Returns the run's folder and scores.
    """
    config = training.with_values(config, **values)
    scoring.check_extras(config)
    with training.open_run(EXPERIMENT, config, SCORES, loggers, with_start) as run:
        data = prepare(run.config, run.folder)
        display.say(describe(data))
        run = run.with_model(data.model)  # the sizes of its vocabularies
        run = run.watching(telling_scores.validation_scores(run.config, data.validation))
        language = run.config.data.target_language
        if strange := describe_word_counting(language):
            display.say(f"warning: data.target_language={strange}")
        if silent := telling_scores.describe_silent(data.validation, language):
            display.say(silent)
        model = training.build_model(run.config, contact=run.contact)
        task = training.Task(
            model=model,
            make_step=make_step,
            batches=training.build_batches(run.config, data),
            evaluate=partial(evaluate, model, data),
            cost=cost,
            origin={"tokenizer": tokenizers.digest(run.folder / "tokenizer")},
        )
        # The first state, with the weights that the run starts from, and the compiled step.
        run, step, state = training.start(run, task)
        # The loop, from the newest checkpoint on: batch, step, log, evaluate, save.
        training.fit(run, step, state, task)
        # The mean of the last checkpoints, or the best one.
        params = training.choose_weights(run, task)
        score(model, data, run, params)
    return read_result(run.folder)


def cost(run: training.OpenRun, batch: PairBatch) -> training.Cost:
    """The cost of a step on `batch`."""
    return seq2seq_cost(run.config.model, batch)


def translator(model: EncoderDecoder, data: Prepared, run: training.OpenRun, params: Any) -> Loaded:
    """The model with `params`, as `jf.load` gives it."""
    return Loaded(
        model,
        params,
        data.source_tokenizer,
        data.target_tokenizer,
        settings=(run.config.search, run.config.translation),
        config=run.config,
    )


def evaluate(
    model: EncoderDecoder, data: Prepared, run: training.OpenRun, params: Any, step: int
) -> training.EvaluationResult:
    """The scores of the validation text; the translations of a step are kept."""
    loaded = translator(model, data, run, params)
    text = data.validation
    search = run.config.search
    if step:
        search = replace(search, beam_size=run.config.training.eval_beam_size)
    scores, hypotheses = scoring.evaluate(loaded, text, search)
    numbers = {f"validation_{name}": x for name, x in scores.items() if isinstance(x, float)}
    if step:
        with run.log.surviving("samples"):
            samples.write_samples(run.folder, f"validation-{step}", text, hypotheses)
    chosen = samples.chosen_samples(text, hypotheses)
    return training.EvaluationResult(numbers | scoring.losses(loaded, text), chosen)


def score(model: EncoderDecoder, data: Prepared, run: training.OpenRun, params: Any) -> None:
    """Translates the test text with the final weights, and writes and shows its scores."""
    loaded, search = translator(model, data, run, params), run.config.search
    name, text = ("test", data.test) if data.test.source else ("validation", data.validation)
    lowercased = run.config.data.corpus == "multi30k"
    with display.phase(f"translating the {name} text"):
        scores, hypotheses = scoring.evaluate(loaded, text, search, lowercased=lowercased)
    samples.write_samples(run.folder, name, text, hypotheses)
    run.write_scores(scoring.facts_to_repeat(run.config, name, text) | scores)
    display.say("\n".join(training.sample_lines(samples.chosen_samples(text, hypotheses))))
    display.say("\n" + score_report.describe_run(run, name, text, scores, hypotheses))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
