"""Files of known data sets: on this machine, or downloaded.

`find` looks in the folder JAXFORMER_DATA, then in the user's cache, and downloads into that.
datasets.json holds addresses and checksums.
"""

import contextlib
import gzip
import hashlib
import http.client
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.runs import user_cache
from jaxformer.errors import DataError
from jaxformer.storage import replacing


class DataSetFiles(NamedTuple):
    """Files of a data set with one address; datasets.json holds them all.

    `url` has {name} where the name of a file goes, without .gz if `zipped`: then plain text is
    downloaded, and gzipped here. None: the files cannot be downloaded, and `source` tells a person
    where to look. `files` maps names to the sha256 of the download.
    """

    files: dict[str, str]
    url: str | None = None
    zipped: bool = False
    source: str = ""


def find(dataset: str, file: str) -> Path:
    """The path of `file` of `dataset`, which is downloaded if it is nowhere on this machine.

    It is looked for in $JAXFORMER_DATA/DATASET/FILE, then in the user's cache folder. A download
    has a fixed address and a fixed sha256. `DataError` says what to do by hand.
    """
    group = _group(dataset, file)
    folder = os.environ.get("JAXFORMER_DATA")
    cached = user_cache.cache_folder() / dataset / file
    for path in ([Path(folder) / dataset / file] if folder else []) + [cached]:
        if path.is_file():
            return path
    if group.url is None:
        raise DataError(
            f"{dataset}/{file} cannot be downloaded: take {group.source}, and {_by_hand(cached)}"
        )
    if folder:
        print(f"JAXFORMER_DATA={folder} has no {dataset}/{file}", file=sys.stderr)
    _download(group, file, cached)
    return cached


def _group(dataset: str, file: str) -> DataSetFiles:
    table = known_datasets()
    if dataset not in table:
        raise DataError(f"there is no data set {dataset!r}: choose one of {', '.join(table)}")
    for group in table[dataset]:
        if file in group.files:
            return group
    names = ", ".join(name for group in table[dataset] for name in group.files)
    raise DataError(f"{dataset} has no file {file!r}: choose one of {names}")


def known_datasets() -> dict[str, list[DataSetFiles]]:
    """Every data set that `find` knows, by name."""
    table = json.loads(Path(__file__).with_name("datasets.json").read_text(encoding="utf-8"))
    return {
        dataset: [DataSetFiles(**group) for group in groups] for dataset, groups in table.items()
    }


def _by_hand(path: Path) -> str:
    return (
        f"put it at {path}, or set JAXFORMER_DATA to the folder that holds "
        f"{path.relative_to(user_cache.cache_folder())}"
    )


def _download(group: DataSetFiles, file: str, path: Path) -> None:
    """Brings `file` to `path`, whole and with the right sha256 or not at all."""
    name = file.rpartition("/")[2]
    assert group.url is not None  # `find` refuses those without one
    url = group.url.format(name=name.removesuffix(".gz") if group.zipped else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {url} to {path}", file=sys.stderr)
    with replacing(path) as part:
        digest = hashlib.sha256()
        size = 0
        with contextlib.ExitStack() as stack:
            out: Any = stack.enter_context(part.open("wb"))
            if group.zipped:  # the bytes depend on the content alone
                out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=out, mtime=0))
            for chunk in _chunks(url, path):
                digest.update(chunk)
                out.write(chunk)
                size += len(chunk)
        if digest.hexdigest() != group.files[file]:
            raise DataError(
                f"{url} gave {size} bytes with sha256 {digest.hexdigest()}, but "
                f"{group.files[file]} was expected: try again, or {_by_hand(path)}"
            )


def _chunks(url: str, path: Path) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            while chunk := response.read(1 << 20):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} could not be downloaded ({error}): check the network, or {_by_hand(path)}"
        ) from error
