"""The training loop of every experiment: steps, evaluations, checkpoints, early stopping."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

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
    training, log = run.config.training, run.log
    total = run.config.optimizer.total_steps
    parts = training.parts_on(run.devices)
    origin = {"data": task.batches.fingerprint, **task.origin}
    state, stopping = _restored(state, run.checkpoints, origin, run.watched.name)
    number = int(state.step)

    def batch_of(number: int) -> Any:
        return run.devices.make_batch(partial(task.batches.batch, number), parts)

    # The process may have ended between saving and evaluating.
    must_evaluate = number > 0 and _must_evaluate(run, task, number, stopping)
    log.resume(number, without=run.watched.name if must_evaluate else None)
    if _goes_on(run, number, stopping):
        _remove_result(run)
        log.call("begin", number + 1)
    display.say(f"{describe_size(state.params)}; from step {number} to {total}")
    if run.config.profile and distributed.is_first():
        step = profiled(step, run.folder / "profile")
    with ExitStack() as stack:
        preempted = stack.enter_context(
            asked_to_stop(run.termination, lambda: run.checkpoints.is_saving)
        )
        progress = stack.enter_context(_make_progress(run))
        between = _BetweenSteps(run, task, progress, Saves(run.checkpoints), origin)
        step = progress.announce(step)
        if must_evaluate:
            stopping = between.evaluate(number, state, stopping)
            between.note_evaluation(number, stopping)
        stop = False
        known: dict[str, Any] = {}  # what env.json has of the first contact with the devices
        loader = stack.enter_context(
            closing(Prefetched(batch_of, number, total, training.prefetch))
        )
        while _goes_on(run, number, stopping):
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
                between.save(number, state, stopping)  # a device may have no room to evaluate
            if _must_evaluate(run, task, number, stopping):
                stopping = between.evaluate(number, state, stopping)
                if regular:
                    between.note_evaluation(number, stopping)
            last = stopping.should_stop(training.patience)
            stop = preempted()
            best = stopping.is_best(number)
            if (last or stop or best) and not regular:
                between.save(number, state, stopping, as_best=best)
            if last and number < total:
                display.say(
                    f"no {run.watched.name} was better in {training.patience} evaluations: "
                    f"training ends at step {number} of {total}"
                )
            if stop:
                break
        between.saves.end()
        if stop:
            display.say(f"saved step {number} in {run.folder}: the same command goes on")
    return state


def _goes_on(run: OpenRun, number: int, stopping: EarlyStopping) -> bool:
    """Whether there is a step to do after step `number`."""
    is_done = number >= run.config.optimizer.total_steps
    return not is_done and not stopping.should_stop(run.config.training.patience)


def _must_evaluate(run: OpenRun, task: Task, number: int, stopping: EarlyStopping) -> bool:
    """Whether the state after step `number` is to be evaluated, and has not been yet."""
    is_due = task.evaluate is not None and due(number, run.config.training.evaluate_every)
    return is_due and stopping.step != number


def _make_progress(run: OpenRun) -> Progress:
    return Progress(
        run.config.optimizer.total_steps,
        lambda step, numbers: run.log.log(step, **numbers),
        log_every=run.config.training.log_every,
        runs_ahead=may_run_ahead(run.devices),
        pause_every=run.config.training.evaluate_every,
        learning_rates=learning_rates(run.config.optimizer),
        peak=peak_of(run.devices, run.config.model.dtype).total,
    )


class _BetweenSteps(NamedTuple):
    """Saving and evaluating a state: what is done between two steps."""

    run: OpenRun
    task: Task
    progress: Progress
    saves: Saves
    origin: Mapping[str, Any]
    """The facts that every checkpoint keeps of what the run trains on."""

    def save(
        self, number: int, state: TrainState, stopping: EarlyStopping, *, as_best: bool = False
    ) -> None:
        """Saves the state after step `number`; `as_best` where only its evaluation asks for it."""
        self.progress.settle()
        metadata = {
            "early_stopping": stopping._asdict(),
            "watched": self.run.watched.name,
            "saved_as_best": as_best,
            **self.origin,
        }
        # Only regular checkpoints are averaged, as if the run had never been stopped.
        regular = due(number, self.run.config.training.save_every)
        with self.progress.held_up("saving"):
            self.run.log.call("flush")
            metric = stopping.metric_at(number)
            self.saves.save(number, state, metadata, metric, regular=regular)

    def evaluate(self, number: int, state: TrainState, stopping: EarlyStopping) -> EarlyStopping:
        """Evaluates the state after step `number`; returns `stopping` after it."""
        assert self.task.evaluate is not None
        with self.progress.pause("evaluating"):
            tree = result_tree(state, self.run.config.training)
            params = evaluated_params(tree, self.run, self.task)
            scores = self.task.evaluate(self.run, params, number)
        return log_evaluation(self.run, number, scores, stopping)

    def note_evaluation(self, number: int, stopping: EarlyStopping) -> None:
        """Adds the evaluation to the checkpoint of step `number`, which was saved before it."""
        self.run.log.call("flush")
        noted = {"early_stopping": stopping._asdict()}
        self.saves.annotate(number, noted, stopping.metric)


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
