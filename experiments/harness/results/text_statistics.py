"""Numbers about texts before training: lengths, duplicates, overlap, and a table of them."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int, UInt64

from jaxformer.text.data import Tokens

PERCENTILES = (1, 50, 90, 99, 100)


def digest(text: str) -> int:
    """64 bits of a hash of `text`; two texts have the same ones with a chance of 5e-20."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def digests(texts: Iterable[str]) -> UInt64[np.ndarray, " N"]:
    """The `digest` of each text."""
    return np.fromiter(map(digest, texts), np.uint64)


def repeated(texts: UInt64[np.ndarray, " N"]) -> int:
    """The number of texts, given by their digests, that equal an earlier one."""
    return len(texts) - len(np.unique(texts))


def contained(texts: UInt64[np.ndarray, " N"], known: UInt64[np.ndarray, " M"]) -> int:
    """The number of texts that are among the `known` ones, both given by their digests."""
    return int(np.isin(texts, known).sum())


def spread(values: Int[np.ndarray, " N"] | np.ndarray) -> str:
    """The percentiles 1, 50, 90, 99 and the greatest of `values`; "-" of none."""
    if len(values) == 0:
        return "-"
    numbers = np.percentile(values, PERCENTILES, method="inverted_cdf")
    is_whole = np.issubdtype(np.asarray(values).dtype, np.integer)
    return " / ".join(f"{x:,.0f}" if is_whole else f"{x:.2f}" for x in numbers)


def count_id(tokens: Tokens, index: int | None) -> int:
    """The number of times that the id occurs; 0 for None."""
    chunk = 1 << 20
    starts = range(0, len(tokens.ids), chunk) if index is not None else ()
    return sum(int((tokens.ids[start : start + chunk] == index).sum()) for start in starts)


def share(count: float, whole: float) -> str:
    """`count`, and its share of `whole`."""
    return f"{count:,} ({count / whole:.2%})" if whole else f"{count:,}"


def report(parts: Mapping[str, Mapping[str, str]]) -> str:
    """The rows of each part under its name, in two columns."""
    width = max((len(name) for rows in parts.values() for name in rows), default=0)
    blocks = []
    for part, rows in parts.items():
        lines = (f"  {name:<{width}}  {value}" for name, value in rows.items())
        blocks.append("\n".join([part, *lines]))
    return "\n".join(blocks)
