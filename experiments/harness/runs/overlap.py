"""Held-out examples that are in use elsewhere, too: their scores say too much."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal


def count_overlap(
    trained: Iterable[Hashable], held_out: Mapping[str, Sequence[Hashable]]
) -> dict[str, int]:
    """The number of examples of each part of `held_out` that are among the `trained` ones.

    `trained` is read once, and may be large.

    >>> count_overlap(iter("abcab"), {"validation": "xaya", "test": ""})
    {'validation': 2, 'test': 0}
    """
    wanted = set().union(*held_out.values())
    shared = {example for example in trained if example in wanted}
    return {
        name: sum(example in shared for example in examples) for name, examples in held_out.items()
    }


def describe_overlap(
    overlap: Mapping[str, int],
    sizes: Mapping[str, int],
    what: str,
    use: Literal["trained on", "validated on"] = "trained on",
) -> list[str]:
    """A line for each part with examples, called `what`, that are in use elsewhere."""
    return [
        f"{name}: {count:,} of {sizes[name]:,} {what} are {use}, too"
        for name, count in overlap.items()
        if count
    ]
