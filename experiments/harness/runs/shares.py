"""Shares of a mixture: the names of texts as `NAME=SHARE`."""

import os
from collections.abc import Sequence

from jaxformer.errors import ConfigError
from jaxformer.text.data.mixture import check_shares


def share_of(name: str) -> tuple[str, float | None]:
    """The name and the share of `NAME=SHARE`; None without a share, and for a file with this name.

    >>> share_of("a.jsonl=0.7"), share_of("b.txt")
    (('a.jsonl', 0.7), ('b.txt', None))
    """
    text, sign, number = name.rpartition("=")
    if not sign or not text or os.path.isfile(os.path.expanduser(name)):
        return name, None
    try:
        return text, float(number)
    except ValueError:
        return name, None


def shares_of(names: Sequence[str]) -> dict[str, float]:
    """The texts of a mixture and their shares; empty where `names` are one text.

    Raises `ConfigError` where some have a share and others do not, for a share that is not positive
    and for a text that comes twice.
    """
    given = [share_of(name) for name in names]
    if all(share is None for _, share in given):
        return {}
    without = [name for name, share in given if share is None]
    if without:
        raise ConfigError(
            f"{without[0]} has no share, but others have: give each text one, as in "
            f"{without[0]}=0.5, or none"
        )
    texts = [name for name, _ in given]
    if len(set(texts)) < len(texts):
        raise ConfigError(f"a text of {', '.join(texts)} comes twice: give it one share")
    shares = {name: share for name, share in given if share is not None}
    check_shares(shares)
    return shares
