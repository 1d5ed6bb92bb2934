"""The content-addressed cache of tokenizers and token ids, which all runs share.

RUNS/texts/records/KEY.json   facts about a text, or about a file while its size and time stay
RUNS/texts/KEY/               the files made from KEY, and their checksums in manifest.json
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.harness.cli import display
from experiments.harness.runs.user_cache import cache_folder, file_digest, local_copy
from jaxformer import __version__, records, storage
from jaxformer.checkpoint.lock import wait_for_lock
from jaxformer.errors import DataError
from jaxformer.records import Record
from jaxformer.text.data import Tokens, open_tokens

_SETTLED_NS = 50_000_000
_SETTLED_OF_SECONDS_NS = 2_500_000_000
"""A file that changed more recently may change again without another time of modification; the
longer time is for file systems that keep whole seconds, or every second one."""


class TextCache:
    """The cache in `folder`; None: nothing is kept. In place of a bucket it is the user's.

    Several processes may use it at once.
    """

    def __init__(self, folder: Path | None = None):
        in_bucket = folder is not None and storage.is_in_bucket(folder)
        self.folder = cache_folder() / "texts" if in_bucket else folder

    def digest(self, path: Path) -> str:
        """The SHA-256 (hex) of a file's bytes, or the fingerprint of a file of ids.

        It is read again only when its size, time of modification or inode has changed.
        """
        path = local_copy(path)
        if self.folder is None or not path.is_file():
            return _digest(path)
        status = _status(path)
        if not _is_settled(status):
            return _digest(path)
        return self.record(["file", *status], lambda: {"digest": _digest(path)})["digest"]

    def record(self, made_from: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The JSON that `make` returns; it is called once for all that equals `made_from`."""
        if self.folder is None:
            return make()
        record = Record(self.folder / "records" / f"{_key(made_from)}.json")
        content = record.read_if_intact()
        if not content:
            content = make()
            record.path.parent.mkdir(parents=True, exist_ok=True)
            record.write(content)
        return content

    def fill(self, folder: Path, made_from: Any, make: Callable[[Path], None]) -> None:
        """Puts the files that `make(FOLDER)` writes into `folder`.

        It is called once for all that equals `made_from`; later its files are linked (ids) or
        copied (any other file). Damaged files are made anew.
        """
        if self.folder is None:
            with storage.written_here(folder) as local:
                make(local)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = self.folder / _key(made_from)
        with open(entry.with_suffix(".lock"), "a", encoding="utf-8") as lock:
            wait_for_lock(lock)
            if not self._is_intact(entry):
                self._make(entry, make)
            for path in entry.iterdir():
                if path.name != "manifest.json":
                    _link_or_copy(path, folder / path.name)

    def whole_tokens(self, path: Path) -> Tokens:
        """The sequences in `path`, compared with their fingerprint; `DataError` if they differ."""
        local = local_copy(path)
        tokens = open_tokens(local)
        if self.digest(local) != tokens.fingerprint:
            remedy = records.REMEDY if local == path else f"remove it: it is a copy of {path}"
            raise DataError(f"{local} is damaged: {remedy}")
        return tokens

    def _is_intact(self, entry: Path) -> bool:
        """Whether `entry` is there with all its files, none of them damaged."""
        if not entry.exists():
            return False
        with contextlib.suppress(DataError, FileNotFoundError):
            files = Record(entry / "manifest.json").read()
            if files and all(self.digest(entry / x) == digest for x, digest in files.items()):
                return True
        display.say(f"{entry} is damaged: it is made again")
        shutil.rmtree(entry)
        return False

    def _make(self, entry: Path, make: Callable[[Path], None]) -> None:
        unfinished = entry.with_suffix(".unfinished")
        unfinished.mkdir(exist_ok=True)
        for path in unfinished.iterdir():
            if path.is_file():  # the folder *.parts holds the ids of a start that was stopped
                path.unlink()
        make(unfinished)
        for path in unfinished.glob("*.parts"):
            shutil.rmtree(path)
        files = {path.name: self.digest(path) for path in unfinished.iterdir()}
        Record(unfinished / "manifest.json").write(files)
        unfinished.rename(entry)


NOTHING_KEPT = TextCache()


def _digest(path: Path) -> str:
    if path.suffix != ".tokens":
        return file_digest(path)
    tokens = open_tokens(path)
    return Tokens(tokens.ids, tokens.offsets).fingerprint


def _is_settled(status: list[int]) -> bool:
    """Whether a file with this status cannot have changed since without another status."""
    in_seconds = all(time_ns % 10**9 == 0 for time_ns in status[-2:])
    settled = _SETTLED_OF_SECONDS_NS if in_seconds else _SETTLED_NS
    return time.time_ns() - status[-1] > settled


def _status(path: Path) -> list[int]:
    """Inode, size and times of a file, which change when its bytes do.

    An archive may give a file any time of modification. Links, which the cache makes of ids, change
    the time of a file's status too.
    """
    status = path.stat()
    times = [status.st_mtime_ns] if path.suffix == ".tokens" else [status.st_ctime_ns]
    return [status.st_ino, status.st_dev, status.st_size, status.st_mtime_ns, *times]


def _key(made_from: Any) -> str:
    """A name for what is made from this JSON by this version of the code."""
    versions = [__version__, importlib.metadata.version("tokenizers")]
    text = json.dumps([versions, made_from], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _link_or_copy(path: Path, target: Path) -> None:
    """Makes `target` a link to `path`, or a copy of it."""
    if isinstance(target, storage.BucketPath):
        target.replace_by(path)
        return
    with storage.replacing(target) as unfinished:
        try:
            if path.suffix != ".tokens":  # a person may edit it
                raise OSError
            os.link(path, unfinished)
        except OSError:  # also: another file system
            shutil.copyfile(path, unfinished)
