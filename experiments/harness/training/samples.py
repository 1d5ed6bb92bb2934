"""Samples of a model beside their references, as lines of text."""

from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """A source, what the model makes of it, and the reference."""

    source: str
    model: str
    reference: str


def sample_lines(samples: Sequence[Sample], width: int | None = 79) -> list[str]:
    """Three lines for each sample, none longer than `width`."""
    names = "source   ", "  model  ", "  right  "
    lines = (f"{name} {text}" for one in samples for name, text in zip(names, one, strict=True))
    return [f"{x[: width - 4]} ..." if width and len(x) > width else x for x in lines]
