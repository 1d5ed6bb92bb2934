"""Damage to the files of the newest checkpoint, and manifests written with bad intent."""

import json
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError
from tests.faults import children, states
from tests.faults.children import Count

OLDER, NEWEST = 3, 5


def _flip(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _halve(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _zero_tail(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


WAYS: tuple[Callable[[Path, Random], None], ...] = (
    lambda path, random: path.write_bytes(b""),
    _halve,
    _zero_tail,
    lambda path, random: path.unlink(),
    *(_flip,) * 4,
)

HOSTILE = (
    {"files": {"../../secret": [3, 7]}},
    {"files": {"/dev/zero": [1 << 60, 7]}},
    {"files": {"state/\0": [3, 7]}},
    {"files": {"state": [4096, 0]}},
    {"files": {"state/_METADATA": [-1, "7"]}},
    {"files": [], "leaves": None},
    {"files": {}, "leaves": {"step": ["int32[]"]}},
    {"metadata": "import os"},
    {"metric": {}},
    {"format": 1 << 70},
)


def every_file(folder: Path, *, every: int) -> Count:
    """Each file of the newest step, damaged in each way, or in one of `every` of these cases.

    The step before must be restored, with a warning. What leaves a file as it was is no try.
    """
    return Count(*children.in_child(partial(_damage_all, folder, every)))


def hostile(folder: Path) -> Count:
    """A newest step whose manifest, with a right CRC-32 of its own, asks for something else."""
    return Count(*children.in_child(partial(_rewrite_all, folder)))


def _damage_all(folder: Path, every: int) -> Count:
    states.make_folder(folder / "whole", (OLDER, NEWEST))
    newest = folder / "whole" / str(NEWEST)
    names = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    cases = [(name, way) for name in names for way in range(len(WAYS))]
    outcomes = []
    for number, (name, way) in enumerate(cases):
        if number % every == 0:
            copy = shutil.copytree(folder / "whole", folder / "copy")
            path = copy / str(NEWEST) / name
            before = path.read_bytes()
            WAYS[way](path, children.drawn(number))
            if not path.exists() or path.read_bytes() != before:
                said = restored(Checkpoints(copy), start=True)
                outcomes.append(f"{name}, way {way}: {said}" if said != "survived" else said)
            shutil.rmtree(copy)
    return children.counted(outcomes)


def _rewrite_all(folder: Path) -> Count:
    states.make_folder(folder / "whole", (OLDER, NEWEST))
    outcomes = []
    for changes in HOSTILE:
        copy = shutil.copytree(folder / "whole", folder / "copy")
        path = copy / str(NEWEST) / "MANIFEST.json"
        content = json.loads(path.read_text()) | changes
        content.pop("crc32")
        rest = json.dumps(content).encode()[1:]
        path.write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)
        outcomes.append(restored(Checkpoints(copy), start=True))
        shutil.rmtree(copy)
    return children.counted(outcomes)


def restored(checkpoints: Checkpoints, *, start: bool) -> str:
    """The outcome of reading the state of a folder, whose newest step is damaged, or of a start."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with checkpoints if start else nullcontext():
                state, metadata = checkpoints.restore(states.make_state(0))
    except CheckpointError as error:
        return f"refused although step {OLDER} is intact: {error}"
    step = metadata.get("step")
    if states.as_bytes(state) != states.as_bytes(states.make_state(step or 0)):
        return f"silent: step {step} has other bytes than were saved"
    if step != OLDER:
        return f"step {step} was used"
    heard = any(f"step {OLDER} is used" in str(warning.message) for warning in said)
    return "survived" if heard else f"silent: step {OLDER} was used without a warning"
