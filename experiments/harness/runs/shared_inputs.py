"""Inputs that all processes of a command must share: files, texts, and folders with weights.

It is compared before the first computation that uses it: with other lines, or another number of
them, processes would wait for each other for ever, or give results of each other's lines.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments.harness.runs import distributed
from experiments.harness.runs.sample_tables import lines_digest
from experiments.harness.runs.user_cache import file_digest, local_copy
from jaxformer import storage
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import DataError
from jaxformer.storage import to_path

_WHOLE = 2**26  # bytes up to which a file of a folder is compared whole
_PIECES = 64  # of a larger file that are compared
_PIECE = 2**16  # bytes of a piece


def check_shared(describe: Callable[[], Mapping[str, str]]) -> None:
    """Raises `ConfigError` in all processes unless `describe()` gives the same in each.

    Where it fails in one, all exit with its code. With one process it is not called.
    """
    if not distributed.is_several():
        return
    with distributed.together():
        described = describe()
    assert_processes_agree(described)


def check_shared_files(paths: Iterable[str]) -> None:
    """`check_shared` of the content of files."""
    check_shared(lambda: {f"the file {path}": _described(to_path(path)) for path in paths})


def check_shared_folder(folder: Path, steps: Callable[[], Iterable[int]]) -> None:
    """`check_shared` of a folder that weights are read from.

    A run is compared by its settings, its tokenizers and the `steps()` that it is read at, another
    folder by all files. Files in a bucket are the same for all.
    """
    if storage.is_in_bucket(folder):
        return

    def describe() -> dict[str, str]:
        checkpoints = folder / "checkpoints"
        if checkpoints.is_dir():
            files = [folder / "config.json", *sorted(folder.glob("tokenizer/*.json"))]
            files += [checkpoints / str(step) / "MANIFEST.json" for step in steps()]
        else:
            if not folder.is_dir():
                raise DataError(f"{folder}: cannot read the folder: No such file or directory")
            files = sorted(path for path in folder.iterdir() if path.is_file())
        return {f"the files of {folder}": lines_digest([_described(path) for path in files])}

    check_shared(describe)


def described_lines(*sides: Sequence[str]) -> str:
    """The number of lines of parallel texts, and a digest of all."""
    return f"{len(sides[0]):,} lines, SHA-256 {lines_digest(*sides)[:12]}"


def _described(path: Path) -> str:
    """The name, the length and a digest of a file; of a large one, of pieces from all over it."""
    if not path.is_file():
        raise DataError(f"{path}: cannot read the file: No such file or directory")
    path = local_copy(path)
    length = path.stat().st_size
    if length <= _WHOLE:
        return f"{path.name}, {length:,} bytes, SHA-256 {file_digest(path)[:12]}"
    pieces = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(number * (length - _PIECE) // (_PIECES - 1), os.SEEK_SET)
            pieces.update(file.read(_PIECE))
    return f"{path.name}, {length:,} bytes, SHA-256 of pieces {pieces.hexdigest()[:12]}"
