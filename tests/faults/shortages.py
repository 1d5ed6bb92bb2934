"""Trainings that run out of memory or of disk, lose a step, diverge, or meet a damaged cache."""

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.task import EvaluationResult
from experiments.translation import train
from experiments.translation.prepare import Prepared
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pretrained import load
from tests.faults import children
from tests.faults.children import Count
from tests.faults.stops import BETWEEN_SAVES
from tests.faults.trainings import Tell, Training, in_steps, left, other, run_of, said

FOR_GOOD = 3  # saves in a row
AT = 17  # the step at which it happens: 14 was saved, and 15 as the best
ASKED = 123_456_789_012
SHOWN = ("115.0 GiB were asked for",)
ERRORS = {
    f"RESOURCE_EXHAUSTED: Out of memory allocating {ASKED} bytes.": SHOWN,
    f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {ASKED} bytes.": SHOWN,
    "INTERNAL: YNNPACK operation failed": (),
}
REMEDIES = ("--data.batch_tokens", "--training.grad_accumulation", "--training.remat blocks")


def memory(folder: Path) -> Count:
    """A step that finds no memory, as XLA says it in three ways.

    The training must end with 1 and say what was asked for and three settings to change; started
    again, it must go on from its last checkpoint to the bytes of one that had enough.
    """

    def short(error: str, tell: Tell) -> AbstractContextManager[Any]:
        def visit(number: int) -> Iterator[None]:
            if number == AT:
                raise jax.errors.JaxRuntimeError(error)
            yield

        return in_steps(visit)

    training, outcomes = Training(folder), []
    for number, (error, words) in enumerate(ERRORS.items()):
        place, words = folder / str(number), ("error: out of memory", *REMEDIES, *words)
        said = training.resumed(place, partial(short, error), 1, *words, step=15)
        outcomes.append((error, said))
    return children.counted(outcomes)


def disk(folder: Path) -> Count:
    """A disk with no room left for checkpoints, logs and metrics, for a while and for good.

    After one or two saves that failed the training must end with the same bytes, and at most lack
    metrics; after three it must end with 74, and, with room again, go on from its last checkpoint
    to the same bytes. The disk is a file system of its own.
    """
    training, small = Training(folder), folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        raise RuntimeError("a file system cannot be mounted here: run this as root")
    try:
        outcomes = [(f"{saves} saves", _fill(training, small, saves)) for saves in (1, 2, FOR_GOOD)]
    finally:
        subprocess.run(["umount", str(small)], check=True)
    return children.counted(outcomes)


def _fill(training: Training, small: Path, saves: int) -> str:
    """The outcome of a training whose disk is full for so many saves."""
    place, copy = small / str(saves), small.parent / f"copy-{saves}"
    code = training.ended(place, partial(_full, small, saves))
    shutil.copytree(place, copy)
    shutil.rmtree(place)
    words = "could not be written" if saves == FOR_GOOD else "the next save tries again"
    if code != (74 if saves == FOR_GOOD else 0) or words not in said(copy):
        return f"ended with {code}: {said(copy)}"
    if saves == FOR_GOOD:
        return training.goes_on(copy)
    found = children.in_child(left, copy)
    expected = json.loads((training.whole / "left.json").read_text())
    more = [line for line in found["metrics"] if line not in expected["metrics"]]
    if more:
        return f"silent: other metrics {more}"
    lacking = {name: expected[name] for name in ("metrics", "weights", "scores")}
    return other(found | lacking, expected)


@contextmanager
def _full(disk: Path, saves: int, tell: Tell) -> Iterator[None]:
    """Another file takes all room of `disk` from the second save on, until `saves` have failed."""
    file = disk / "other"

    def visit(number: int, checkpoints: Checkpoints, *_: Any) -> Iterator[None]:
        if number == 2:
            checkpoints.wait()
            _take_all(file)
        if number == 2 + saves and saves != FOR_GOOD:
            futures.wait(filter(None, [checkpoints._committing]))
            file.unlink()
        yield

    with children.in_calls(Checkpoints, "save", visit):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _take_all(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def cache(folder: Path, tries: int) -> Count:
    """Compiled programs in the cache cut short, emptied or overwritten: the same bytes learned."""
    training, outcomes = Training(folder), []
    programs = folder / "programs"
    for number in range(tries):
        shutil.copytree(training.whole.parents[1] / "programs", programs)
        random = children.drawn(number)
        for path in programs.iterdir():
            content = path.read_bytes()
            kept = content[: random.randrange(len(content))] if number else b""
            path.write_bytes(kept + random.randbytes(len(content) - len(kept)) * (number % 2))
        outcomes.append((f"cut {number}", _same(training, folder / str(number), programs=programs)))
        shutil.rmtree(programs)
    return children.counted(outcomes)


def clock(folder: Path) -> Count:
    """The clock goes back by an hour, or by ten years, while a training runs: the same bytes."""

    def back(seconds: float, tell: Tell) -> AbstractContextManager[Any]:
        now = time.time

        def visit(number: int) -> Iterator[None]:
            if number == AT:
                time.time = lambda: now() - seconds
            yield

        return in_steps(visit)

    training = Training(folder)
    return children.counted(
        (f"{seconds} s", _same(training, folder / str(seconds), partial(back, seconds)))
        for seconds in (3_600, 10 * 365 * 86_400)
    )


def _same(training: Training, place: Path, *around: Any, **how: Any) -> str:
    code = training.ended(place, *around, **how)
    if code != 0:
        return f"ended with {code}: {said(place)}"
    expected = json.loads((training.whole / "left.json").read_text())
    return other(children.in_child(left, place), expected)


def not_finite(folder: Path) -> Count:
    """Validation that is NaN from step 16 on: the result is the good step, with 70; all is JSON."""
    training, run = Training(folder, BETWEEN_SAVES), run_of(folder / "nan")
    code = training.ended(folder / "nan", _diverging)
    if code != 70 or "is not finite: the result of" not in said(folder / "nan"):
        return children.counted([("NaN", f"ended with {code}: {said(folder / 'nan')}")])
    chosen = json.loads((run / "weights.json").read_text())["steps"]
    good = [children.in_child(lambda: Checkpoints(run / "checkpoints").best_step())]
    records = [run / "weights.json", *run.glob("checkpoints/*/MANIFEST.json")]
    texts = [path.read_text() for path in records]
    texts += (run / "metrics.jsonl").read_text().splitlines()
    bare = [text for text in texts if not _is_json(text)]
    right = chosen == good and chosen[0] < 16 and not bare
    return children.counted([("NaN", "survived" if right else f"silent: {chosen}, {bare}")])


def _diverging(tell: Tell) -> AbstractContextManager[Any]:
    """The validations of step 16 on are NaN, and the first of those that choose the weights."""
    evaluate, chosen = train.evaluate, iter([True])

    def evaluated(
        model: EncoderDecoder, data: Prepared, run: OpenRun, params: Any, step: int
    ) -> EvaluationResult:
        scores, samples = evaluate(model, data, run, params, step)
        at_step = step or 99 * next(chosen, False)  # the first choice of weights has step 0
        lost = {"validation_loss": math.nan, "validation_bleu": 0.0} if at_step >= 16 else {}
        return EvaluationResult({**scores, **lost}, samples)

    return mock.patch.object(train, "evaluate", evaluated)


def _is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def gone(folder: Path) -> Count:
    """The step that weights.json names is gone: reading the run says so, with the steps it has."""
    training = Training(folder, BETWEEN_SAVES)
    run = run_of(shutil.copytree(training.whole, folder / "copy"))
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

    return children.counted([("gone", children.in_child(refused))])


def too_large(folder: Path) -> Count:
    """A model larger than the memory is refused in one sentence before anything of it is made."""
    training = Training(folder, {"--model.d_model": 400_000, "--model.d_ff": 7})
    code = training.ended(folder / "large")
    last = said(folder / "large").splitlines()[-1]
    right = code == 2 and last.startswith("error: the state needs ")
    return children.counted([("large", "survived" if right else f"ended with {code}: {last}")])
