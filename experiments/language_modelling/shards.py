"""Shards of ids in files .bin, as nanoGPT, llm.c and modded-nanogpt write them.

nanoGPT's are bare uint16 ids. Those of llm.c and modded-nanogpt begin with 256 int32: a magic
number, the version 1 and the number of ids; uint16 ids follow.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.batches import check_positive
from jaxformer.text.data.tokens import Tokens

_MAGIC, _VERSION, _HEADER_BYTES = 20240520, 1, 256 * 4
_BLOCK = 1 << 20


def open_shard(path: str | os.PathLike[str]) -> UInt16[np.ndarray, " ids"]:
    """The ids of a shard, memory-mapped; a file without a header holds bare ids.

    Raises `DataError` for a file that is absent, empty or of an odd number of bytes, and for a
    header of another kind, version or number of ids.

    >>> tokens = Tokens.from_lists([[5, 6, 7], [8]], vocab_size=9)
    >>> (path,) = write_shards(tokens, "shards")
    >>> open_shard(path).tolist(), path.stat().st_size  # 1,024 bytes of header, 2 for each id
    ([5, 6, 7, 8], 1032)
    """
    try:
        raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DataError(f"{path}: cannot open the shard: {error}") from error
    header = raw[:_HEADER_BYTES].tobytes()
    magic, version, count = np.frombuffer(header.ljust(12, b"\0")[:12], "<i4").tolist()
    if magic != _MAGIC:
        # Bare ids never begin with a few numbers and a thousand zero bytes.
        if len(header) == _HEADER_BYTES and any(header[:12]) and not any(header[64:]):
            raise DataError(
                f"{path}: a header with the magic number {magic}, but only {_MAGIC}, of uint16 "
                "ids, is supported: write the shard with the data scripts of modded-nanogpt"
            )
        if len(raw) % 2:
            raise DataError(f"{path}: {len(raw)} bytes are no uint16 ids: the number is odd")
        return raw.view("<u2")
    if version != _VERSION:
        raise DataError(f"{path}: the header has version {version}; only {_VERSION} is supported")
    if len(raw) != _HEADER_BYTES + 2 * count:
        raise DataError(
            f"{path}: the header promises {count} ids, {_HEADER_BYTES + 2 * count} bytes in all, "
            f"but the file has {len(raw)}: it was cut short, or holds ids of another width"
        )
    return raw[_HEADER_BYTES:].view("<u2")


def write_shards(
    tokens: Tokens,
    folder: str | os.PathLike[str],
    *,
    name: str = "train",
    ids_per_shard: int = 100_000_000,
    header: bool = True,
) -> list[Path]:
    """Writes the ids of `tokens`, all sequences in a row, to NAME_000000.bin and so on.

    `header` False writes bare ids, as nanoGPT reads them. Raises `ConfigError` for a vocabulary of
    more than 65,536 ids.

    >>> tokens = Tokens.from_lists([[5, 6, 7], [8]], vocab_size=9)
    >>> [path.name for path in write_shards(tokens, "shards", ids_per_shard=3)]
    ['train_000000.bin', 'train_000001.bin']
    """
    check_positive(ids_per_shard=ids_per_shard)
    if tokens.vocab_size is None or tokens.vocab_size > 1 << 16:
        raise ConfigError(
            f"a shard holds ids below 65,536, but the vocabulary has {tokens.vocab_size} ids"
        )
    paths = []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(tokens.ids), ids_per_shard)):
        ids = tokens.ids[start : start + ids_per_shard]
        paths.append(Path(folder) / f"{name}_{number:06d}.bin")
        first = np.zeros(256, "<i4")
        first[:3] = _MAGIC, _VERSION, len(ids)
        with open(paths[-1], "wb") as file:
            file.write(first.tobytes() if header else b"")
            for block in range(0, len(ids), _BLOCK):
                file.write(ids[block : block + _BLOCK].astype("<u2").tobytes())
    return paths


def shard_documents(
    paths: Iterable[str | os.PathLike[str]], begin: int | None
) -> Iterator[tuple[UInt16[np.ndarray, " ids"], bool]]:
    """The ids of all shards in parts, and whether a document ends with each (`write_parts`).

    A document begins at each id `begin`; with None all shards are one document.

    >>> paths = write_shards(Tokens.from_lists([[1, 5, 6, 1, 7]], vocab_size=9), "shards")
    >>> [(ids.tolist(), ends) for ids, ends in shard_documents(paths, begin=1) if len(ids) or ends]
    [([1, 5, 6], False), ([], True), ([1, 7], False), ([], True)]
    """
    started = False
    for path in paths:
        ids = open_shard(path)
        for start in range(0, len(ids), _BLOCK):
            block = ids[start : start + _BLOCK]
            cuts = np.flatnonzero(block == begin) if begin is not None else np.empty(0, np.int64)
            for part in np.split(block, cuts):
                if started and len(part) and part[0] == begin:
                    yield part[:0], True
                started = started or len(part) > 0
                yield part, False
    yield np.empty(0, np.uint16), True
