"""Checkpoints in an emulated bucket: kills, damage, failing requests, two writers."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from tests import buckets
from tests.faults import children, damage, folders, kills, states
from tests.faults.children import Count


def killed(tries: int) -> Count:
    """Runs that save and prune without end, killed `tries` times."""
    return _in_bucket(lambda folder: kills.at_random(folder, tries))


def damaged(every: int) -> Count:
    """Each object of the newest step, damaged in each way, or in one of `every` of these cases."""
    return _in_bucket(lambda folder: Count(*children.in_child(partial(_damage_all, folder, every))))


def troubled() -> Count:
    """Saves and restores while one request of ten fails, or is slow."""

    def both(folder: Path) -> Count:
        faults = {"failing": {"fail_every": 10}, "slow": {"slow_every": 10, "seconds": 0.1}}
        outcomes = []
        for name, fault in faults.items():
            with buckets.injected(**fault):
                outcomes.append(children.in_child(partial(_save_and_restore, folder / name)))
        return children.counted(outcomes)

    return _in_bucket(both)


def misused() -> Count:
    """Two writers, one that was taken over, one that may only read, a bucket that is not there."""
    cases = (folders.two_runs, _taken_over, _read_only, _absent)
    return _in_bucket(lambda folder: children.counted([case(folder) for case in cases]))


def _in_bucket(count: Callable[[Path], Count]) -> Count:
    """What `count` returns for an empty folder in a bucket."""
    with buckets.serving():
        # Children are forked from a process that has imported all and sent no request.
        return count(storage.to_path("gs://bucket/checkpoints"))


def _damage_all(folder: Path, every: int) -> Count:
    states.make_folder(folder, (damage.OLDER, damage.NEWEST))
    newest = folder / str(damage.NEWEST)
    names = list(storage.lengths(newest))
    cases = [(name, way) for name in names for way in range(len(damage.WAYS))]
    outcomes = []
    for number, (name, way) in enumerate(cases):
        if number % every:
            continue
        path = newest / name
        before = path.read_bytes()
        damage.WAYS[way](path, children.drawn(number))
        if not path.exists() or path.read_bytes() != before:
            said = damage.restored(Checkpoints(folder), start=False)
            outcomes.append(f"{path}, way {way}: {said}" if said != "survived" else said)
        path.write_bytes(before)
    return children.counted(outcomes)


def _save_and_restore(folder: Path) -> str:
    with Checkpoints(folder) as checkpoints:
        states.save(checkpoints, 3)
    return "survived" if states.is_right(Checkpoints(folder)) else "silent: other bits"


def _taken_over(folder: Path) -> str:
    def taken_over() -> str:
        with Checkpoints(folder) as first:
            states.save(first, 3)
            first.wait()
            content = json.loads((folder / ".lock").read_text())
            (folder / ".lock").write_text(json.dumps(content | {"expires": 0}))
            with Checkpoints(folder) as second:
                states.save(second, 5)
                said = folders.refusal(lambda: states.save(first, 7), folder)
        right = Checkpoints(folder).steps() == [3, 5] and states.is_right(Checkpoints(folder))
        return said if right else "silent: the second run's step is not there"

    return children.in_child(taken_over)


def _read_only(folder: Path) -> str:
    def refused() -> str:
        with buckets.injected(read_only=True):
            said = folders.refusal(lambda: Checkpoints(folder).__enter__(), folder)
            return said if states.is_right(Checkpoints(folder)) else "silent: other bits were read"

    return children.in_child(refused)


def _absent(folder: Path) -> str:
    absent = storage.to_path(os.fspath(folder).replace("bucket", "absent"))
    return children.in_child(
        partial(folders.refusal, lambda: Checkpoints(absent).__enter__(), absent)
    )
