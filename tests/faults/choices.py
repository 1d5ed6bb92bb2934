"""Trainings whose best step lies between two saves, that diverge, lose a step or ask too much."""

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness.training.task import EvaluationResult
from experiments.translation import train
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError
from jaxformer.pretrained import load
from tests.faults import children, trainings
from tests.faults.children import Count
from tests.faults.trainings import Tell

EVERY = {"--training.evaluate_every": 4, "--optimizer.total_steps": 22}
KILLED = (1, 2, 3)  # the save in whose place a training is killed


def best(folder: Path) -> Count:
    """Evaluated every 4 steps and saved every 7: the best evaluation is that of a kept step.

    Also where it is killed as a step is saved, and resumed, which leaves the same bytes.
    """
    trainings.load_libraries()
    args = trainings.settings(folder) | EVERY
    expected = trainings.completed(args, folder / "whole")
    outcomes = [children.in_child(partial(_kept_best, folder / "whole"))]
    for call in KILLED:
        place = folder / f"killed-{call}"
        trainings.ended(args, place, partial(_killed, call))
        newest = children.in_child(partial(_newest, place))
        said = trainings.goes_on(args, place, expected, newest)
        outcomes.append(
            said if said != "survived" else children.in_child(partial(_kept_best, place))
        )
    return children.counted(outcomes)


def not_finite(folder: Path) -> Count:
    """Validation that is NaN from step 16 on: the result is the good step, with 70; all is JSON."""
    trainings.load_libraries()
    args = trainings.settings(folder) | EVERY
    code = trainings.ended(args, folder / "nan", _diverging)
    said, run = trainings.said(folder / "nan"), trainings.run_of(folder / "nan")
    if code != 70 or "is not finite: the result of" not in said:
        return children.counted([f"ended with {code}: {said}"])
    chosen = json.loads((run / "weights.json").read_text())["steps"]
    good = chosen == [children.in_child(partial(_best, run))] and chosen[0] < 16
    records = [
        run / "metrics.jsonl",
        run / "weights.json",
        *run.glob("checkpoints/*/MANIFEST.json"),
    ]
    bare = [path for path in records if not _is_json(path)]
    return children.counted(["survived" if good and not bare else f"silent: {chosen}, {bare}"])


def gone(folder: Path) -> Count:
    """The step that weights.json names is gone: reading the run says so, with the steps it has."""
    trainings.load_libraries()
    trainings.completed(trainings.settings(folder) | EVERY, folder / "whole")
    run = trainings.run_of(folder / "whole")
    chosen = json.loads((run / "weights.json").read_text())["steps"]
    shutil.rmtree(run / "checkpoints" / str(chosen[0]))

    def refused() -> str:
        try:
            load(run)
        except CheckpointError as error:
            kept = ", ".join(map(str, Checkpoints(run / "checkpoints").steps()))
            named = f"step {', '.join(map(str, chosen))}, but the run keeps {kept}" in str(error)
            return "survived" if named else f"the steps are not named: {error}"
        return "silent: other weights were read"

    return children.counted([children.in_child(refused)])


def too_large(folder: Path) -> Count:
    """A model larger than the memory is refused in one sentence before anything of it is made."""
    trainings.load_libraries()
    sizes = {"--model.d_model": 400_000, "--model.d_ff": 7}
    code = trainings.ended(trainings.settings(folder) | sizes, folder / "large")
    last = trainings.said(folder / "large").splitlines()[-1]
    right = code == 2 and last.startswith("error: the state needs ")
    return children.counted(["survived" if right else f"ended with {code}: {last}"])


def _kept_best(place: Path) -> str:
    run = trainings.run_of(place)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    scores = [line["validation_bleu"] for line in lines if "validation_bleu" in line]
    checkpoints = Checkpoints(run / "checkpoints")
    kept = checkpoints.metadata(checkpoints.best_step())["early_stopping"]
    if -kept["metric"] != max(scores):
        return f"silent: the best of {scores} is gone, and {kept} took its place"
    return "survived" if len(checkpoints.steps()) <= 5 else f"kept {checkpoints.steps()}"


def _best(run: Path) -> int | None:
    return Checkpoints(run / "checkpoints").best_step()


def _newest(place: Path) -> int:
    return Checkpoints(trainings.run_of(place) / "checkpoints").newest_step() or 0


def _is_json(path: Path) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        for line in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            json.loads(line, parse_constant=refuse)
    except ValueError:
        return False
    return True


@contextmanager
def _killed(number: int, tell: Tell) -> Iterator[None]:
    """The process dies in the place of the save `number`, counted from 0."""
    save, calls = Checkpoints.save, iter(range(100))

    def save_or_die(self: Checkpoints, *args: Any, **named: Any) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, *args, **named)

    Checkpoints.save = save_or_die
    yield


@contextmanager
def _diverging(tell: Tell) -> Iterator[None]:
    """The validations of step 16 on are NaN, and the first of those that choose the weights."""
    evaluate, chosen = train.evaluate, iter([True])

    def evaluated(*args: Any) -> EvaluationResult:
        scores, samples = evaluate(*args)
        step = args[3] or 99 * next(chosen, False)
        lost = {"validation_loss": math.nan, "validation_bleu": 0.0} if step >= 16 else {}
        return EvaluationResult({**scores, **lost}, samples)

    train.evaluate = evaluated
    yield
