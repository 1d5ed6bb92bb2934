"""Train a Transformer to translate: `python -m experiments.translation.train --preset NAME`.

The same command again resumes. Everything is kept in runs/translation/NAME. This file is meant to
be copied: model, loss and step, then data, loop and score.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.tree_util import Partial

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.checkpoint_selection import TrainResult, read_result
from experiments.harness.runs.loggers import Logger
from experiments.harness.training import build, initialization, session
from experiments.harness.training.fit import Cost, fit
from experiments.harness.training.flops import seq2seq_flops
from experiments.harness.training.progress import sample_lines
from experiments.harness.training.utilization import rows_and_length
from experiments.translation import evaluate as evaluation
from experiments.translation.load_run import LoadedRun, build_model
from experiments.translation.prepare import Prepared, describe, prepare, with_parent
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.distributed import CompiledStep, Strategy
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.data import PairBatch, all_rows
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.train_step import TrainState, init_train_state

EXPERIMENT = "translation"
SCORES = ("validation_bleu", "validation_chrf", "validation_exact", "validation_loss")
"""The scores of each evaluation; early stopping uses the first unless another is named."""


def main(config: TranslationConfig) -> None:
    """The command."""
    train(config)


def make_init_and_step(
    config: TranslationConfig, model: EncoderDecoder, batch: PairBatch, devices: Strategy
) -> tuple[Callable[[], TrainState], CompiledStep]:
    """The function that makes the first state, and the compiled step on batches like `batch`.

    The step takes the gradient of the summed loss, divides it by the number of tokens and updates
    the parameters once. Its program depends on neither seed nor learning rate: runs share it.
    """
    training = config.training
    weight = training.distillation_weight if training.teacher else 0.0
    loss = build.build_loss(training, partial(seq2seq_loss, distillation=weight))(
        model, pad=PAD, label_smoothing=training.label_smoothing, loss_chunk=training.loss_chunk
    )
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
    return Partial(init, *rngs, batch.source[:2], batch.target[:2, :-1]), step


def train(
    config: TranslationConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: Callable[..., Any] = make_init_and_step,
    **values: Any,
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test set.

    `values` are of your own, by the names in `build.VALUES`, such as `block`; the run records them.
    `loggers` get all that is logged. Returns the run's folder and scores.
    """
    config = build.with_values(config, **values)
    evaluation.check_extras(config)
    with session.open_training(EXPERIMENT, config, SCORES, loggers, with_parent) as run:
        config, devices = run.config, run.devices
        data = prepare(config, run.folder)
        display.say(describe(data))
        batches = build.build_batches(config, data)
        config = replace(config, model=data.model)  # with the sizes of the vocabularies
        model = build_model(config)
        beam = replace(config.search, beam_size=config.training.eval_beam_size)

        def batch(number: int) -> Any:
            parts = config.training.parts_on(devices)
            return devices.make_batch(partial(batches.batch, number), parts)

        def loaded(params: Any) -> LoadedRun:
            tokenizers = data.source_tokenizer, data.target_tokenizer
            settings = config.search, config.translation
            return LoadedRun(model, params, *tokenizers, settings, config=config)

        def validate(state: TrainState) -> session.Evaluated:
            params = build.result_params(state, config.training)
            return evaluate(run, loaded(params), data, beam, f"validation-{state.step}")

        def choose(params: Any) -> session.Evaluated:
            return evaluate(run, loaded(params), data, config.search)

        devices = devices.for_model(model)
        init, step = make_step(config, model, batches.batch(0, all_rows), devices)
        with display.phase("creating the model"):
            state = devices.init(init)
        state = initialization.start(run, model, state, devices, batches.fingerprint)
        if config.training.teacher:
            from experiments.translation.teacher import with_teacher

            step = with_teacher(step, config, data, devices, run.folder)
        origin = {"data": batches.fingerprint}  # what the checkpoints are trained on
        fit(step, state, batch, validate, run, cost=partial(cost, config), origin=origin)
        params = session.choose_weights(run, devices, choose, "validation_bleu")
        score(run, loaded(params), data)
    return read_result(run.folder)


def cost(config: TranslationConfig, batch: Any) -> Cost:
    """The target positions of a batch on its devices, and the FLOPs of a step on it."""
    positions = batch.target.size - batch.example_ids.size
    sizes = *rows_and_length(batch.source), batch.target.shape[-1] - 1
    return Cost(positions, seq2seq_flops(config.model, *sizes))


def evaluate(
    run: session.ExperimentRun, loaded: LoadedRun, data: Prepared, search: Any, name: str = ""
) -> session.Evaluated:
    """The scores of the validation text; its translations are kept in samples/NAME.tsv."""
    text, training = data.validation, loaded.config.training
    language = loaded.config.data.target_language
    scores, hypotheses = evaluation.evaluate(loaded, text, search, language=language)
    own = build.own_metrics(training, build.Evaluation(loaded, text, scores, hypotheses))
    numbers = {key: scores[key] for key in ("bleu", "chrf", "exact")} | own
    numbers = {f"validation_{key}": value for key, value in numbers.items()}
    numbers |= evaluation.losses(loaded, text)
    samples = evaluation.chosen_samples(text, hypotheses)
    if name and distributed.is_first():
        with run.log.surviving("samples"):
            evaluation.write_samples(run.folder, name, text, hypotheses)
    return session.Evaluated(numbers, samples)


def score(run: session.ExperimentRun, loaded: LoadedRun, data: Prepared) -> None:
    """Translates the test text with the final weights, and writes and shows its scores."""
    config = loaded.config
    name, text = ("test", data.test) if data.test.source else ("validation", data.validation)
    language, lowercased = config.data.target_language, config.data.corpus == "multi30k"
    with display.phase(f"translating the {name} text"):
        scores, hypotheses = evaluation.evaluate(
            loaded, text, config.search, language=language, lowercased=lowercased
        )
    own = build.own_metrics(config.training, build.Evaluation(loaded, text, scores, hypotheses))
    if distributed.is_first():
        evaluation.write_samples(run.folder, name, text, hypotheses)
    run.write_scores(evaluation.facts_to_repeat(config, name, text) | scores | own)
    display.say("\n".join(sample_lines(evaluation.chosen_samples(text, hypotheses))))
    said = evaluation.describe_run(run.folder, name, text, scores, hypotheses, language)
    display.say(f"\n{said}")


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
