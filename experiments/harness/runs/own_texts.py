"""Texts that a function of the user gives, package.module:name."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from experiments.harness.runs.records import is_unicode
from experiments.harness.runs.source_kinds import kind_of
from experiments.harness.runs.text_cache import TextCache
from experiments.harness.runs.user_cache import cache_folder
from jaxformer.config import import_by_name
from jaxformer.errors import DataError, shorten


def read_called(name: str, count: int | None = None) -> Iterator[tuple[str, ...]]:
    """The texts, or tuples of `count` texts, that the function `name` yields; None: of any."""
    items = import_by_name(name, "data")()
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise DataError(f"{name} must give texts or pairs of texts, got {items!r:.80}")
    for number, item in enumerate(items, start=1):
        texts = tuple(item) if isinstance(item, tuple | list) else (item,)
        is_text = all(isinstance(text, str) and is_unicode(text) for text in texts)
        if not is_text or len(texts) != (count or len(texts)):
            wanted = {1: "a text", 2: "a pair of texts"}.get(
                count or 0, "a text or a pair of texts"
            )
            raise DataError(f"{name}, item {number}: needed {wanted}, got {shorten(repr(item))}")
        yield texts


def called_once(name: str, fields: Sequence[str], cache: TextCache) -> str:
    """`name`; in place of your own function, the file of what it gives at this one call.

    A text is read several times, and your function may give another order each time, which would
    train on what it is tested with. The file has the `fields` that the text is read by, and is kept
    in `cache`, or in the user's.
    """
    if kind_of(name) != "function":
        return name
    folder = (cache.folder or cache_folder()) / "called"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    # Not a file of `tempfile`, which nobody else may read: colleagues share a cache.
    unfinished = folder / f"{uuid.uuid4().hex}.unfinished"
    try:
        with open(unfinished, "xb") as file:
            for texts in read_called(name, len(fields)):
                line = json.dumps(_record_of(fields, texts)).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = folder / f"{name.partition(':')[2]}-{digest.hexdigest()[:32]}.jsonl"
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return str(path)


def _record_of(fields: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """A record that has `texts` under the dotted `fields`."""
    record: dict[str, Any] = {}
    for field, text in zip(fields, texts, strict=True):
        *groups, last = field.split(".")
        inner = record
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = text
    return record
