"""The training loop of every experiment: steps, evaluations, checkpoints, early stopping."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.distributed import asked_to_stop
from experiments.harness.runs.quantities import described_score
from experiments.harness.training.build import learning_rates
from experiments.harness.training.chips import peak_of
from experiments.harness.training.early_stopping import EarlyStopping
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parameters import describe_size, evaluated_params, result_tree
from experiments.harness.training.prefetching import Prefetched
from experiments.harness.training.profiling import profiled
from experiments.harness.training.progress import Progress
from experiments.harness.training.samples import sample_lines
from experiments.harness.training.saves import Saves
from experiments.harness.training.task import Cost, EvaluationResult, Task
from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import Strategy, agreed, assert_processes_agree
from jaxformer.errors import CheckpointError
from jaxformer.pretrained.run_weights import weights_of
from jaxformer.training.train_step import TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, Mapping[str, Any]]]


def fit(run: OpenRun, step: Step, state: TrainState, task: Task) -> TrainState:
    """The state after the last step; training goes on from the newest checkpoint if there is one.

    `step(state, batch)` returns the next state and its metrics, as `Strategy.step` does. A thread
    makes the batches ahead of the steps. The task is evaluated every
    `config.training.evaluate_every` steps, and early stopping goes by its scores. Every checkpoint
    keeps what the run trains on.

    SIGTERM and SIGINT save the state after the current step and end the process. A resumed run
    computes, logs and saves what one that was never stopped does. Raises `Diverged` after too many
    steps in a row without a finite loss, `CheckpointError` for checkpoints of other batches.
    """
    config, log, checkpoints = run.config, run.log, run.checkpoints
    training = config.training
    total = config.optimizer.total_steps
    parts = training.parts_on(run.devices)
    origin = {"data": task.batches.fingerprint, **task.origin}
    state, stopping = _restored(state, checkpoints, origin, run.watched.name)
    number = int(state.step)

    def batch_of(number: int) -> Any:
        return run.devices.make_batch(partial(task.batches.batch, number), parts)

    def evaluates() -> bool:
        """Whether the state is to be evaluated, and has not been yet."""
        due_now = task.evaluate is not None and due(number, training.evaluate_every)
        return due_now and stopping.step != number

    def goes_on() -> bool:
        """Whether there is a step to do."""
        return number < total and not stopping.should_stop(training.patience)

    log.resume(number, without=run.watched.name if evaluates() else None)
    if goes_on():
        _remove_result(run)
        log.call("begin", number + 1)
    display.say(f"{describe_size(state.params)}; from step {number} to {total}")
    if config.profile and distributed.is_first():
        step = profiled(step, run.folder / "profile")
    with ExitStack() as stack:
        preempted = stack.enter_context(
            asked_to_stop(run.termination, lambda: checkpoints.is_saving)
        )
        progress = stack.enter_context(
            Progress(
                total,
                lambda step, numbers: log.log(step, **numbers),
                log_every=training.log_every,
                runs_ahead=may_run_ahead(run.devices),
                pause_every=training.evaluate_every,
                learning_rates=learning_rates(config.optimizer),
                peak=peak_of(run.devices, config.model.dtype).total,
            )
        )

        saves = Saves(checkpoints)

        def save(*, as_best: bool = False) -> None:
            progress.settle()
            noted = {
                "early_stopping": stopping._asdict(),
                "watched": run.watched.name,
                "saved_as_best": as_best,
            }
            with progress.held_up("saving"):
                log.call("flush")
                # Only regular checkpoints are averaged, as if the run had never been stopped.
                regular = due(number, training.save_every)
                metric = stopping.metric_at(number)
                saves.save(number, state, noted | origin, metric, regular=regular)

        def evaluated(*, is_saved: bool) -> EarlyStopping:
            assert task.evaluate is not None
            with progress.pause("evaluating"):
                params = evaluated_params(result_tree(state, training), run, task)
                scores = task.evaluate(run, params, number)
            after = log_evaluation(run, number, scores, stopping)
            if is_saved:
                log.call("flush")
                noted = {"early_stopping": after._asdict()}
                saves.annotate(number, noted, after.metric)
            return after

        step = progress.announce(step)
        if number and evaluates():  # the process ended between saving and evaluating
            stopping = evaluated(is_saved=True)
        stop = False
        known: dict[str, Any] = {}  # what env.json has of the first contact with the devices
        loader = stack.enter_context(
            closing(Prefetched(batch_of, number, total, training.prefetch))
        )
        while goes_on():
            batch = loader.get()
            state, metrics = step(state, batch)
            number += 1
            size = Cost(0, 0) if task.cost is None else task.cost(run, batch)
            progress.add(number, metrics, *size, loader.waited)
            if run.contact.facts() != known:
                known = run.contact.facts()
                log.add_environment(**known)
            regular = number == total or due(number, training.save_every)
            if regular:
                save()  # before the evaluation, which a device may have no room for
            if evaluates():
                stopping = evaluated(is_saved=regular)
            last = stopping.should_stop(training.patience)
            stop = preempted()
            best = stopping.is_best(number)
            if (last or stop or best) and not regular:
                save(as_best=best)
            if last and number < total:
                display.say(
                    f"no {run.watched.name} was better in {training.patience} evaluations: "
                    f"training ends at step {number} of {total}"
                )
            if stop:
                break
        saves.end()
        if stop:
            display.say(f"saved step {number} in {run.folder}: the same command goes on")
    return state


def _remove_result(run: OpenRun) -> None:
    """Removes the record of the final weights, whose steps may be removed from now on."""
    weights = weights_of(run.folder).path
    if distributed.is_first() and weights.exists():
        storage.remove(weights)


def may_run_ahead(devices: Strategy) -> bool:
    """Whether a step may be dispatched before the last one has ended.

    Not on a CPU, which has nothing to wait for in between, and holds the temporary memory of both.
    """
    return devices.mesh.devices.item(0).platform != "cpu"


def log_evaluation(
    run: OpenRun, step: int, evaluated: EvaluationResult, stopping: EarlyStopping
) -> EarlyStopping:
    """Logs and shows the evaluation after `step`; returns `stopping` after it."""
    scores, samples = evaluated
    shown = [described_score(name, value) for name, value in scores.items()]
    stopping = stopping.update(agreed(run.watched.of(scores)), step)
    run.log.log(step, **scores)
    best = run.watched.describe_best(stopping)
    display.say(f"step {step}  {'  '.join(shown)}  ({best})")
    if samples:
        run.log.log_text(step, "samples", sample_lines(samples, None))
        display.say("\n".join(sample_lines(samples)))
    return stopping


def _restored(
    state: TrainState, checkpoints: Checkpoints, origin: Mapping[str, Any], watched: str
) -> tuple[TrainState, EarlyStopping]:
    """The newest checkpoint's state and validation; `state` and none where there is no checkpoint.

    Raises `CheckpointError` when it was trained on other batches, or validated by another score
    than the one that is `watched`; `ConfigError` when several processes have other batches, or see
    other checkpoints, than each other.
    """
    steps = checkpoints.steps()
    assert_processes_agree({"batches": origin["data"], "checkpoints": steps})
    if not steps:
        return state, EarlyStopping()
    state, metadata = checkpoints.restore(state)
    assert_processes_agree({"step": int(state.step)})
    if metadata.get("data") != origin["data"]:
        raise CheckpointError(
            "the checkpoint was trained on other batches than these: the training text, the "
            "tokenizer or the settings of its batches have changed; use another --name"
        )
    stopping = EarlyStopping(**metadata["early_stopping"])
    before = metadata.get("watched", watched)
    if stopping.best is not None and before != watched:
        raise CheckpointError(
            f"the best step so far was chosen by {before}, but this validation text is watched by "
            f"{watched}: give the validation text that the run began with, or another --name"
        )
    return state, stopping


def due(step: int, interval: int) -> bool:
    """Whether what is done every `interval` steps (never, when 0) is done after `step`."""
    return interval > 0 and step % interval == 0
