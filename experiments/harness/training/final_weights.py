"""The choice of a run's final weights."""

import math
from typing import Any

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.runs.quantities import described_score
from experiments.harness.training.open_run import OpenRun
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
    training, checkpoints = run.config.training, run.checkpoints
    score = run.watched.name
    assert task.evaluate is not None
    last = last_steps(checkpoints, training.average_checkpoints)
    # Only the first process notes a validation: another one may not see the last step's yet.
    best = int(agreed(checkpoints.best_step() or 0))
    chosen: tuple[float, list[int], Any, float] | None = None
    diverged: list[str] = []
    for steps in [last, [best]] if best and last != [best] else [last]:
        params = checkpoints.average_params(
            steps, tree=training.result_tree, shardings=run.devices.shardings
        )
        names = ", ".join(map(str, steps))
        with display.phase(f"validating the weights of step {names}"):
            scores = task.evaluate(run, params, 0).scores
        metric, value = run.watched.of(scores), scores[score]
        display.say(f"  validation {described_score(score, value)}")
        # BLEU is 0 where the loss is NaN.
        if not (math.isfinite(value) and math.isfinite(scores.get("validation_loss", 0.0))):
            diverged.append(names)
        elif chosen is None or metric < chosen[0]:
            chosen = metric, steps, params, value
    if chosen is None:
        raise Diverged(
            "the validation of no checkpoint is finite: lower the learning rate, or train with "
            "--model.dtype float32, under another --name"
        )
    _, steps, params, value = chosen
    if distributed.is_first():
        note = {"steps": steps, "tree": training.result_tree, score: value}
        weights_of(run.folder).write(note)
    if diverged:
        raise Diverged(
            f"the validation of the weights of step {', '.join(diverged)} is not finite: the "
            f"result of {run.folder} is step {steps[0]}. Evaluate it, or lower the learning "
            "rate and train under another --name"
        )
    return params
