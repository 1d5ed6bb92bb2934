"""Statistics of texts before training: sizes, lengths, duplicates, overlap, and a table of them."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int, UInt64

from jaxformer.text.data import Tokens

Digests = UInt64[np.ndarray, " N"]


def digest(text: str) -> int:
    """64 bits of a hash of `text`; two texts have the same ones with a chance of 5e-20."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def digests(texts: Iterable[str]) -> Digests:
    """The `digest` of each text."""
    return np.fromiter(map(digest, texts), np.uint64)


def repeated(texts: Digests) -> str:
    """The number and the share of the texts, given by their digests, that equal an earlier one."""
    return share(len(texts) - len(np.unique(texts)), len(texts))


def contained(texts: Iterable[str], known: Digests) -> str:
    """The number and the share of the texts whose digests are among the `known` ones."""
    return share(int(np.isin(hashes := digests(texts), known).sum()), len(hashes))


def describe(
    texts: Iterable[str], tokens: Tokens, *, limit: int, unk: int | None
) -> dict[str, str]:
    """Sizes, lengths and duplicates of `texts`, whose ids are `tokens`.

    Lengths are the percentiles 1, 50, 90, 99 and 100 of the tokens of a text.
    """
    sizes = np.array([(digest(x), len(x.split()), len(x.encode())) for x in texts], np.uint64)
    hashes, words, size = sizes.reshape(-1, 3).T
    count, lengths = len(tokens.ids), tokens.lengths
    return {
        "texts": f"{len(hashes):,}",
        "words": f"{words.sum():,}",
        "bytes": f"{size.sum():,}",
        "tokens": f"{count:,}",
        "tokens a word": f"{count / max(int(words.sum()), 1):.2f}",
        "tokens a text": spread(lengths),
        "tokens unknown": share(_count(tokens, unk), count),
        "same as an earlier text": repeated(hashes),
        "without tokens": share(int((lengths == 0).sum()), len(lengths)),
        f"longer than {limit} tokens": share(int((lengths > limit).sum()), len(lengths)),
    }


def spread(lengths: Int[np.ndarray, " N"]) -> str:
    """The percentiles 1, 50, 90, 99 and the greatest of `lengths`; "-" of none."""
    if len(lengths) == 0:
        return "-"
    percentiles = np.percentile(lengths, (1, 50, 90, 99, 100), method="inverted_cdf")
    return " / ".join(f"{x:,.0f}" for x in percentiles)


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


def _count(tokens: Tokens, index: int | None) -> int:
    """The number of times that the id occurs; 0 for None."""
    chunk = 1 << 20
    starts = range(0, len(tokens.ids), chunk) if index is not None else ()
    return sum(int((tokens.ids[start : start + chunk] == index).sum()) for start in starts)
