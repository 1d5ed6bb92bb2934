"""Train a Transformer to translate: `python -m experiments.translation.train --preset NAME`.

The same command again resumes. Everything is kept in runs/translation/NAME.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import jax
from flax import linen as nn
from jax.tree_util import Partial

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import checkpoint_selection, distributed, run_folder
from experiments.harness.runs.checkpoint_selection import TrainResult, read_result
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.preemption import asked_to_stop
from experiments.harness.training import build, initialization
from experiments.harness.training.adapters import describe_size, with_lora
from experiments.harness.training.early_stopping import (
    EarlyStopping,
    due,
    restore_newest,
    stopping_metric,
)
from experiments.harness.training.flops import seq2seq_flops
from experiments.harness.training.metric_logger import Progress
from experiments.harness.training.prefetch import prefetched
from experiments.harness.training.profiling import profiled
from experiments.harness.training.training_config import (
    OptimizerConfig,
    record_environment,
    started,
)
from experiments.harness.training.training_view import sample_lines
from experiments.harness.training.utilization import peak_of, rows_and_length
from experiments.translation.attend import draw_attention
from experiments.translation.corpus import fingerprint
from experiments.translation.evaluate import (
    check_extras,
    chosen_samples,
    describe_run,
    evaluate,
    half_widths,
    losses,
    write_samples,
)
from experiments.translation.load_run import LoadedRun, build_model
from experiments.translation.prepare import Prepared, describe, prepare, with_parent
from experiments.translation.presets import PRESETS, TrainingConfig, TranslationConfig
from experiments.translation.teacher import make_teach
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig
from jaxformer.distributed import CountedJit, Strategy
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.data import PairBatch, all_rows
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import Loss, seq2seq_loss
from jaxformer.training.train_step import TrainState

METRICS = ("validation_bleu", "validation_chrf", "validation_loss")
"""The scores of each evaluation; early stopping uses the first unless another is named."""


def main(config: TranslationConfig) -> None:
    """The command."""
    train(config)


def train(
    config: TranslationConfig, *, loggers: Iterable[Logger] = (), **values: Any
) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and scores the result on the test set.

    `values` may be a `model`, a `block`, an `attention_fn`, a `loss`, a
    `schedule`, an `optimizer`, `metrics`, `batches`, a `dataset` and a `tokenizer` of your own, in
    place of those that `config` names; the run records their names (see `build.with_values`).
    `loggers` get all that is logged (see `Logger`). Returns the run's folder and scores; a script
    may train several runs, one after the other.
    """
    config = build.with_values(config, **values)
    build.check(config)
    stopping_metric(config.training, METRICS)
    check_extras(config)
    with distributed.joined(config), started(config) as (devices, setup):
        config = with_parent(config)
        run = run_folder.open_run(
            config.runs, "translation", config.name, config, may_differ=config.free_fields()
        )
        run.loggers = build.build_loggers(config.training, run.folder, loggers)
        record_environment(run, config, setup=setup)
        prepared = prepare(config, run.folder)
        display.say(describe(prepared))
        model = build_model(config, prepared.model)
        keep = config.training.average_checkpoints + 1  # one may have been saved on preemption
        with Checkpoints(run.folder / "checkpoints", keep=keep, patience=3) as checkpoints:
            run_steps(config, prepared, model, devices, checkpoints, run)
            finish(config, prepared, model, checkpoints, run)
        run.close()
    return read_result(run.folder)


def run_steps(
    config: TranslationConfig,
    prepared: Prepared,
    model: EncoderDecoder,
    devices: Strategy,
    checkpoints: Checkpoints,
    run: run_folder.Run,
) -> None:
    """The training loop, from the newest checkpoint, or from the start, to the last step."""
    training, total = config.training, config.optimizer.total_steps
    batches = build.build_batches(config, prepared)
    make_state, compiled = assemble(config, model, batches.batch(0, all_rows), devices)
    with display.phase("creating the model"):
        state = devices.init(make_state)
    traced = config.profile and distributed.is_first()
    step = profiled(compiled, run.folder / "profile") if traced else compiled
    state = initialization.start(config, state, checkpoints, devices, batches.fingerprint)
    state, stopping = restore_newest(checkpoints, state, batches.fingerprint)
    teach = make_teach(config, prepared, devices, run.folder)
    number = int(state.step)
    run.resume(number)
    peak = peak_of(devices, model.config.dtype)
    record_environment(run, config, utilization=peak)
    display.say(f"{describe_size(state.params)}; from step {number} to {total}")

    def make_batch(number: int) -> Any:
        return devices.shard_batch(batches.batch(number, devices.local_rows))

    with ExitStack() as stack:
        progress = Progress(
            total,
            run,
            log_every=training.log_every,
            pause_every=training.evaluate_every,
            learning_rates=build.learning_rates(config.optimizer),
            peak=peak.total,
        )
        step = progress.announce(
            step, programs=1 if config.data.batches else len(prepared.batches.buckets)
        )
        preempted = stack.enter_context(asked_to_stop())
        stack.enter_context(progress)
        loader = stack.enter_context(prefetched(make_batch, number, total, training.prefetch))
        while number < total and not stopping.should_stop(training.patience):
            batch = loader.get()
            state, metrics = step(state, teach(batch))
            number += 1
            positions = batch.target.size - batch.example_ids.size
            work = flops_of(model.config, batch)
            progress.add(number, metrics, positions, work, loader.waited)
            if due(number, training.evaluate_every):
                params = build.result_params(state, training)
                loaded = with_params(config, prepared, model, distributed.local(devices, params))
                stopping = validate(loaded, prepared, number, stopping, run, progress)
            last = number == total or stopping.should_stop(training.patience)
            regular = last or due(number, training.save_every)
            stop = preempted()
            if regular or stop:
                progress.settle()
                metadata = {"early_stopping": stopping._asdict(), "data": batches.fingerprint}
                metadata["regular"] = due(number, training.save_every)
                # Checkpoints saved on preemption are not candidates for the final weights.
                metric = stopping.metric_at(number) if regular else None
                checkpoints.save(number, state, metadata, metric)
            if stop:
                break
        checkpoints.wait()


def assemble(
    config: TranslationConfig, model: nn.Module, batch: PairBatch, devices: Strategy
) -> tuple[Callable[[], TrainState], CountedJit]:
    """What makes the first state of `model`, and its compiled step on batches like `batch`."""
    init_rng, rng = jax.random.split(jax.random.key(config.training.seed))
    first_state, step = programs(
        model, devices, config.training.compiled(), config.optimizer.compiled()
    )
    inputs = batch.source[:2], batch.target[:2, :-1]
    return Partial(first_state, init_rng, rng, config.optimizer.learning_rate, *inputs), step


@lru_cache(maxsize=8)
def programs(
    model: nn.Module, devices: Strategy, training: TrainingConfig, rates: OptimizerConfig
) -> tuple[Callable[..., TrainState], CountedJit]:
    """What makes a first state, and the compiled step, of runs whose seed and rate are data."""
    loss: Callable[..., Loss] = seq2seq_loss
    if training.teacher:
        loss = partial(seq2seq_loss, distillation=training.distillation_weight)
    make_loss = build.build_loss(training, loss, rates.freeze)
    step = devices.step(
        make_loss(
            model, pad=PAD, label_smoothing=training.label_smoothing, loss_chunk=training.loss_chunk
        ),
        build.build_optimizer(with_lora(rates, training), schedule_free=training.schedule_free),
        grad_accumulation=training.grad_accumulation,
        ema_decay=training.ema_decays,
        gradient_noise_scale=training.gradient_noise_scale,
        log_update_ratio=training.log_update_ratio,
        gather_at=training.gather_at,
        gather_dtype=model.config.dtype,
    )
    return build.make_first_state(model, training, rates), step


def validate(
    loaded: LoadedRun,
    prepared: Prepared,
    step: int,
    stopping: EarlyStopping,
    run: run_folder.Run,
    progress: Progress,
) -> EarlyStopping:
    """Logs and shows the translations of the validation text after `step`, and their scores."""
    training, search = loaded.config.training, loaded.config.search
    search = replace(search, beam_size=training.eval_beam_size)
    text = prepared.validation
    with progress.pause(f"translating {len(text.source):,} sentences"):
        scores, hypotheses = evaluate(loaded, text, search, lowercased=False)
        numbers = losses(loaded, text)
        own = build.own_metrics(training, build.Evaluation(loaded, text, scores, hypotheses))
        samples = chosen_samples(text, hypotheses)
        if training.log_attention:
            draw = partial(draw_attention, loaded, samples[0].source, samples[0].model)
            run.log_figure(step, "attention", draw)
    numbers |= {f"validation_{name}": value for name, value in own.items()}
    scored = {f"validation_{name}": scores[name] for name in ("bleu", "chrf")}
    run.log(step, **numbers, **scored)
    run.log_text(step, "samples", sample_lines(samples))
    watched = stopping_metric(training, METRICS)
    stopping = stopping.update(distributed.agreed(watched.of(numbers | scored)), step)
    told = [f"{name.replace('_', ' ')} {x:.4f}" for name, x in numbers.items()]
    told.append(f"BLEU {scores['bleu']:.2f} ({watched.describe_best(stopping)})")
    progress.show_scores(
        f"step {step}  {'  '.join(told)}  chrF {scores['chrf']:.2f}  {scores['exact']:.1%} exact",
        told[-1],
        samples,
    )
    if distributed.is_first():
        with run.surviving("samples"):
            write_samples(run.folder, f"validation-{step}", text, hypotheses)
    return stopping


def finish(
    config: TranslationConfig,
    prepared: Prepared,
    model: EncoderDecoder,
    checkpoints: Checkpoints,
    run: run_folder.Run,
) -> None:
    """Chooses the final weights, scores them on the test text and writes scores.json."""

    def metric(params: Any, steps: list[int]) -> float:
        loaded = with_params(config, prepared, model, params)
        name = f"validating the weights of step {', '.join(map(str, steps))}"
        with display.phase(name):
            result = evaluate(loaded, prepared.validation, config.search, lowercased=False)
        display.say(f"  validation BLEU {result.scores['bleu']:.2f}")
        return -result.scores["bleu"]

    chosen = checkpoint_selection.choose(checkpoints, config.training, metric)
    name = "test" if prepared.test.source else "validation"
    text = prepared.test if prepared.test.source else prepared.validation
    loaded = with_params(config, prepared, model, chosen.params)
    if distributed.is_first():
        tree = config.training.result_tree
        checkpoint_selection.note(run.folder, chosen.steps, tree, validation_bleu=-chosen.metric)
    lowercased = config.data.corpus == "multi30k"
    with display.phase(f"translating the {name} text"):
        scores, hypotheses = evaluate(loaded, text, config.search, lowercased=lowercased)
        own = build.own_metrics(config.training, build.Evaluation(loaded, text, scores, hypotheses))
    record = {"text": name, "text_sha256": fingerprint(text), "search": asdict(config.search)}
    record |= {"translation": asdict(config.translation)}
    record |= scores | own
    if distributed.is_first():
        write_samples(run.folder, name, text, hypotheses)
        (run.folder / "scores.json").write_text(json.dumps(record, indent=2) + "\n")
    signatures = {key: value for key, value in scores.items() if key.endswith("_signature")}
    record_environment(run, config, **signatures)
    display.say("\n".join(sample_lines(chosen_samples(text, hypotheses))))
    halves = half_widths(hypotheses, text.target)
    display.say("\n" + describe_run(run.folder, name, text, scores, halves))


def with_params(
    config: TranslationConfig, prepared: Prepared, model: EncoderDecoder, params: Any
) -> LoadedRun:
    """The run's model with `params`."""
    return LoadedRun(config, model, params, prepared.source_tokenizer, prepared.target_tokenizer)


def flops_of(sizes: TransformerConfig, batch: PairBatch) -> int:
    """FLOPs of a step on a placed batch by the equations of a model of `sizes`."""
    return seq2seq_flops(sizes, *rows_and_length(batch.source), batch.target.shape[-1] - 1)


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment="translation")
