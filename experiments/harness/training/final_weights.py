"""The choice of a run's final weights."""

import math
from typing import Any, NamedTuple

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.quantities import described_score
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.parameters import evaluated_params
from experiments.harness.training.task import Task
from jaxformer.distributed import agreed
from jaxformer.errors import Diverged
from jaxformer.pretrained import last_steps
from jaxformer.pretrained.run_weights import weights_of


def choose_weights(run: OpenRun, task: Task) -> Any:
    """The final weights: the mean of the last checkpoints, or the weights of the best one alone.

    Both are evaluated as the task's `evaluate` says. The better score, the one that early stopping
    watches, wins; the mean wins a tie, and one that is not finite never wins. weights.json records
    the choice. Raises `Diverged` where one of them is not finite.
    """
    training = run.config.training
    score = run.watched.name
    assert task.evaluate is not None
    last = last_steps(run.checkpoints, training.average_checkpoints)
    candidates = [last]
    # Only the first process notes a validation: another one may not see the last step's yet.
    best = int(agreed(run.checkpoints.best_step() or 0))
    if best and last != [best]:
        candidates.append([best])
    chosen: _Candidate | None = None
    diverged: list[str] = []
    for steps in candidates:
        mean = run.checkpoints.average_unmerged(
            steps, tree=training.result_tree, shardings=run.devices.shardings
        )
        params = evaluated_params(mean, run, task)
        del mean  # merged parameters are other arrays
        names = ", ".join(map(str, steps))
        with display.phase(f"validating the weights of step {names}"):
            scores = task.evaluate(run, params, 0).scores
        value = scores[score]
        to_minimise = run.watched.of(scores)
        display.say(f"  validation {described_score(score, value)}")
        # The loss, too: BLEU is 0, which is finite, where the loss is NaN.
        if not (math.isfinite(value) and math.isfinite(scores.get("validation_loss", 0.0))):
            diverged.append(names)
        elif chosen is None or to_minimise < chosen.to_minimise:
            chosen = _Candidate(steps, params, value, to_minimise)
    if chosen is None:
        raise Diverged(
            "the validation of no checkpoint is finite: lower the learning rate, or train with "
            "--model.dtype float32, under another --name"
        )
    if distributed.is_first():
        note = {"steps": chosen.steps, "tree": training.result_tree, score: chosen.value}
        weights_of(run.folder).write(note)
    if diverged:
        raise Diverged(
            f"the validation of the weights of step {', '.join(diverged)} is not finite: the "
            f"result of {run.folder} is step {chosen.steps[0]}. Evaluate it, or lower the learning "
            "rate and train under another --name"
        )
    return chosen.params


class _Candidate(NamedTuple):
    """Weights that may become the result, and their validation."""

    steps: list[int]
    """The checkpoints whose mean they are."""
    params: Any
    value: float
    """The score that early stopping watches."""
    to_minimise: float
    """The score, or its negative where a larger one is better."""
