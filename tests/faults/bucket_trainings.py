"""kill -9 at random moments of a training in a bucket, which then leaves what a local one does."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from jaxformer.checkpoint import Checkpoints
from jaxformer.storage import to_path
from tests import buckets
from tests.faults import children, trainings
from tests.faults.children import Count

PACKAGES = ("gcsfs",)
"""What the bucket is read and written with."""
SHORT = {
    "--optimizer.total_steps": 14,
    "--training.save_every": 3,
    "--training.evaluate_every": 5,
}


def killed(folder: Path, tries: int) -> Count:
    """A training killed `tries` times in a bucket, each time resumed once.

    The second start must go on from the newest step that was committed, and leave the bytes, the
    scores and the lines of metrics of a local training that was never killed.
    """
    trainings.load_libraries()
    args = trainings.settings(folder) | SHORT
    expected = trainings.completed(args, folder / "whole")
    random, outcomes, place = children.drawn(7), [], folder / "killed"
    cache, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), str(folder / "cache")
    try:
        with buckets.serving():
            length = _length(args, folder / "measured")
            for number in range(tries):
                there = args | {"--runs": f"gs://bucket/{number}"}
                after = random.random() * length
                said = _kill(there, place, after, expected)
                outcomes.append(f"{after:.2f} s: {said}" if said != "survived" else said)
                shutil.rmtree(place)
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        os.environ |= {} if cache is None else {"XDG_CACHE_HOME": cache}
    return children.counted(outcomes)


def _length(args: dict, place: Path) -> float:
    """The seconds of a training in a bucket."""
    child = trainings.begin(args | {"--runs": "gs://bucket/measured"}, place)
    since = [time.monotonic() for line in child.told() if line == "begun"]
    if child.wait() != 0:
        raise RuntimeError(trainings.said(place))
    return time.monotonic() - since[0]


def _kill(args: dict, place: Path, after: float, expected: dict) -> str:
    """The outcome of a training that is killed `after` seconds, and started again."""
    child = trainings.begin(args, place)
    for line in child.told():
        if line == "begun":
            time.sleep(after)
            child.send(signal.SIGKILL)
    child.wait()
    runs = to_path(args["--runs"])
    newest = children.in_child(partial(_newest, runs))
    code = trainings.ended(args, place)
    return trainings.judge(code, place, expected, newest, runs)


def _newest(runs: Path) -> int:
    return Checkpoints(trainings.run_of(runs) / "checkpoints").newest_step() or 0
