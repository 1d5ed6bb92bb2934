"""Train a language model: `python -m experiments.language_modelling.train --preset NAME`.

The same command again resumes. Everything is kept in runs/language_modelling/NAME.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
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
from experiments.harness.runs.text_io import bold
from experiments.harness.training import build, initialization
from experiments.harness.training.adapters import describe_size, with_lora
from experiments.harness.training.closing import closing
from experiments.harness.training.early_stopping import (
    EarlyStopping,
    due,
    restore_newest,
    stopping_metric,
)
from experiments.harness.training.metric_logger import Progress
from experiments.harness.training.prefetch import prefetched
from experiments.harness.training.profiling import profiled
from experiments.harness.training.training_config import (
    OptimizerConfig,
    TrainingConfig,
    record_environment,
    started,
)
from experiments.harness.training.utilization import peak_of
from experiments.language_modelling.attend import draw_attention
from experiments.language_modelling.evaluate import (
    answer_prompts,
    batch_losses,
    custom_metrics,
    describe_scores,
    join_samples,
    loss_interval,
    measure,
    own_metrics,
    scores_of,
    total,
    write_losses,
)
from experiments.language_modelling.init_from_pretrained import (
    with_pretrained_params,
    with_pretrained_sizes,
)
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
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import CountedJit, Strategy
from jaxformer.text.data import all_rows
from jaxformer.training.losses import Loss
from jaxformer.training.train_step import TrainState


def main(config: LanguageConfig) -> None:
    """The command."""
    train(config)


def train(config: LanguageConfig, *, loggers: Iterable[Logger] = (), **values: Any) -> TrainResult:
    """Prepares the text, trains from the newest checkpoint, and shows what the model has learned.

    `values` may be a `model`, a `block`, an `attention_fn`, a `loss`, a
    `schedule`, an `optimizer`, `metrics`, `batches`, a `dataset` and a `tokenizer` of your own, in
    place of those that `config` names; the run records their names (see `build.with_values`).
    `loggers` get all that is logged (see `Logger`). Returns the run's folder and scores; a script
    may train several runs, one after the other.
    """
    config = build.with_values(config, **values)
    build.check(config)
    stopping_metric(config.training, known_scores(config))
    with distributed.joined(config), started(config) as (devices, setup):
        config = with_pretrained_sizes(config)
        run = run_folder.open_run(
            config.runs, "language_modelling", config.name, config, may_differ=config.free_fields()
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


def known_scores(config: LanguageConfig) -> tuple[str, ...]:
    """The scores of each evaluation; early stopping uses the first unless another is named."""
    bits = ("validation_bits_per_byte",) if config.objective == "causal" else ()
    return ("validation_loss", *bits)


def run_steps(
    config: LanguageConfig,
    prepared: Prepared,
    model: nn.Module,
    devices: Strategy,
    checkpoints: Checkpoints,
    run: run_folder.Run,
) -> None:
    """The training loop, from the newest checkpoint, or from the start, to the last step."""
    training, total = config.training, config.optimizer.total_steps
    batches = build.build_batches(config, prepared)
    flops = objective(config).flops
    step: Callable[..., Any]
    make_state, step = assemble(config, model, batches.batch(0, all_rows), devices)
    with display.phase("creating the model"):
        state = with_pretrained_params(config, devices.init(make_state), devices)
    if config.profile and distributed.is_first():
        step = profiled(step, run.folder / "profile")
    state = initialization.start(config, state, checkpoints, devices, batches.fingerprint)
    state, stopping = restore_newest(checkpoints, state, batches.fingerprint)
    origin = {"data": batches.fingerprint, "tokenizer": tokenizer_digest(run.folder)}
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
        step = progress.announce(step, programs=1)
        preempted = stack.enter_context(asked_to_stop())
        stack.enter_context(progress)
        loader = stack.enter_context(prefetched(make_batch, number, total, training.prefetch))
        while number < total and not stopping.should_stop(training.patience):
            batch = loader.get()
            state, metrics = step(state, batch)
            number += 1
            work = flops(model.config, batch)
            progress.add(number, metrics, batch.loss_mask.size, work, loader.waited)
            if due(number, training.evaluate_every):
                params = build.result_params(state, training)
                params = distributed.local(devices, params)
                loaded = LoadedRun(config, model, params, prepared.tokenizer)
                stopping = validate(loaded, prepared, number, stopping, run, progress)
            last = number == total or stopping.should_stop(training.patience)
            regular = last or due(number, training.save_every)
            stop = preempted()
            if regular or stop:
                progress.settle()
                metadata = {"early_stopping": stopping._asdict(), **origin}
                metadata["regular"] = due(number, training.save_every)
                # Checkpoints saved on preemption are not candidates for the final weights.
                metric = stopping.metric_at(number) if regular else None
                checkpoints.save(number, state, metadata, metric)
            if stop:
                break
        checkpoints.wait()


def assemble(
    config: LanguageConfig, model: nn.Module, batch: Any, devices: Strategy
) -> tuple[Callable[[], TrainState], CountedJit]:
    """What makes the first state of `model`, and its compiled step on batches like `batch`."""
    task = objective(config)
    init_rng, rng = jax.random.split(jax.random.key(config.training.seed))
    first_state, step = programs(
        model, devices, task.loss, config.training.compiled(), config.optimizer.compiled()
    )
    inputs = (leaf[:2] for leaf in task.inputs(batch))
    return Partial(first_state, init_rng, rng, config.optimizer.learning_rate, *inputs), step


@lru_cache(maxsize=8)
def programs(
    model: nn.Module,
    devices: Strategy,
    loss: Callable[..., Loss],
    training: TrainingConfig,
    rates: OptimizerConfig,
) -> tuple[Callable[..., TrainState], CountedJit]:
    """What makes a first state, and the compiled step, of runs whose seed and rate are data."""
    step = devices.step(
        build.build_loss(training, loss, rates.freeze)(model, loss_chunk=training.loss_chunk),
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
    """Logs and shows the likelihood of the validation text after `step`."""
    with progress.pause("measuring the validation text"):
        found = measure(loaded, prepared.validation)
        own = custom_metrics(loaded, prepared.validation, found)
        if loaded.config.training.log_attention:
            draw = partial(draw_attention, loaded, loaded.config.prompts)
            run.log_figure(step, "attention", draw)
    numbers = {"validation_loss": found.loss}
    if loaded.config.objective == "causal":
        numbers["validation_bits_per_byte"] = found.bits_per_byte
    numbers |= own
    run.log(step, **numbers)
    watched = stopping_metric(loaded.config.training, known_scores(loaded.config))
    stopping = stopping.update(distributed.agreed(watched.of(numbers)), step)
    said = "  ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in numbers.items())
    said += f"  ({watched.describe_best(stopping)})"
    progress.show_scores(f"step {step}  {said}", said)
    return stopping


def finish(
    config: LanguageConfig,
    prepared: Prepared,
    model: nn.Module,
    checkpoints: Checkpoints,
    run: run_folder.Run,
) -> None:
    """Chooses the final weights, measures them on the test text, and shows what they do."""

    def metric(params: Any, steps: list[int]) -> float:
        loaded = LoadedRun(config, model, params, prepared.tokenizer)
        with display.phase(f"validating the weights of step {', '.join(map(str, steps))}"):
            found = measure(loaded, prepared.validation)
        display.say(f"  validation loss {found.loss:.4f}")
        return found.loss

    folder = run.folder
    chosen = checkpoint_selection.choose(checkpoints, config.training, metric)
    if distributed.is_first():
        tree = config.training.result_tree
        checkpoint_selection.note(folder, chosen.steps, tree, validation_loss=chosen.metric)
    loaded = LoadedRun(config, model, chosen.params, prepared.tokenizer)
    with display.phase("continuing the prompts"):
        answers = answer_prompts(loaded)
    if answers and distributed.is_first():
        (folder / "samples").mkdir(exist_ok=True)
        text = join_samples(config.prompts, answers)
        (folder / "samples" / "prompts.txt").write_text(text, encoding="utf-8")
        display.say(join_samples([bold(prompt) for prompt in config.prompts], answers))
        run.log_text(config.optimizer.total_steps, "samples", text.split("\n"))
    name = "validation" if prepared.test is None else "test"
    with display.phase(f"measuring the {name} text"):
        measured = prepared.test or prepared.validation
        losses = batch_losses(loaded, measured)
        found = total(losses, measured)
        own = own_metrics(loaded, measured, found)
    record = {
        "text": name,
        "text_sha256": text_digest(folder, name),
        "stride": config.data.seq_len,
        **scores_of(config, found),
        **own,
    }
    if distributed.is_first():
        write_losses(folder, name, losses)
        written = json.dumps(record, indent=2) + "\n"
        (folder / "scores.json").write_text(written, encoding="utf-8")
    display.say(describe_scores(name, config, found, loss_interval(losses)))
    files = {"samples/prompts.txt": "the prompts and what the model makes of them"}
    commands = [(f"language_modelling.{name}",) for name in ("generate", "evaluate", "report")]
    display.say("\n" + closing(folder, files, commands))


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment="language_modelling")
