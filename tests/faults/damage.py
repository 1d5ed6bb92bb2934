"""Damage to the files of the newest checkpoint, and manifests written with bad intent."""

import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError
from tests.faults import children, states
from tests.faults.children import Count

OLDER, NEWEST = 3, 5


def flip(content: bytes, random: Random) -> bytes:
    """`content` with another bit."""
    place, bit = random.randrange(len(content)), 1 << random.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


WAYS: tuple[Callable[[bytes, Random], bytes | None], ...] = (
    lambda content, random: b"",
    lambda content, random: content[: len(content) // 2],
    lambda content, random: content[: len(content) // 2] + bytes(-(-len(content) // 2)),
    lambda content, random: None,  # no file
    *(flip,) * 4,
)

HOSTILE = (
    {"files": {"../../secret": [3, 7]}},
    {"files": {"/dev/zero": [1 << 60, 7]}},
    {"files": {"/etc/hostname": [3, 7]}},
    {"files": {"state/\0": [3, 7]}},
    {"files": {"state": [4096, 0]}},
    {"files": {"state/_METADATA": [-1, "7"]}},
    {"files": {"state/_METADATA": [3]}},
    {"files": [], "leaves": None},
    {"files": {}, "leaves": {"step": ["int32[]"]}},
    {"leaves": {"step": 3}},
    {"metadata": "import os"},
    {"metric": {}},
    {"metric": "low"},
    {"regular": 1},
    {"format": 2},
    {"format": 1 << 70},
)


def every_file(folder: Path, every: int) -> Count:
    """Each file of the newest step, damaged in each way, or in one of `every` of these cases.

    The step before must be restored, with a warning. What leaves a file as it was is no try.
    """
    return children.counted_in_child(_damage_all, folder, every)


def hostile(folder: Path) -> Count:
    """A newest step whose manifest, with a right CRC-32 of its own, asks for something else."""
    return children.counted_in_child(_rewrite_all, folder)


def _damage_all(folder: Path, every: int) -> Iterator[tuple[str, str]]:
    states.make_folder(folder, (OLDER, NEWEST))
    newest, remote = folder / str(NEWEST), storage.is_in_bucket(folder)
    whole = {name: (newest / name).read_bytes() for name in sorted(storage.lengths(newest))}
    cases = [(name, way) for name in whole for way in range(len(WAYS))]
    for number, (name, way) in enumerate(cases):
        damaged = WAYS[way](whole[name], children.drawn(number)) if whole[name] else None
        if number % every or damaged == whole[name]:
            continue
        if damaged is None:
            (newest / name).unlink()
        else:
            (newest / name).write_bytes(damaged)
        yield f"{name}, way {way}", restored(Checkpoints(folder), start=not remote)
        for each in [name] if remote else whole:  # a start may have removed the others
            (newest / each).parent.mkdir(parents=True, exist_ok=True)
            (newest / each).write_bytes(whole[each])


def _rewrite_all(folder: Path) -> Iterator[tuple[str, str]]:
    states.make_folder(folder, (OLDER, NEWEST))
    path = folder / str(NEWEST) / "MANIFEST.json"
    whole = json.loads(path.read_text())
    whole.pop("crc32")
    for changes in HOSTILE:
        rest = json.dumps(whole | changes).encode()[1:]
        path.write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)
        yield str(changes), restored(Checkpoints(folder), start=True)


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
