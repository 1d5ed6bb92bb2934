"""Curves as lines of text, for terminals that show Unicode."""

import math
from collections.abc import Sequence

import numpy as np

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character, by row and column."""


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters that draw `values` from left to right.

    The largest and the smallest value stand at the left. Blank for less than two finite values.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    if len(finite) < 2:
        return [" " * width] * height
    low, high = float(finite.min()), float(finite.max())
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    margin = max(map(len, labels.values())) + 1
    rows = _dots(finite, 2 * (width - margin), 4 * height)
    return [f"{labels.get(i, ''):>{margin - 1}} {row}" for i, row in enumerate(rows)]


def _dots(values: np.ndarray, width: int, height: int) -> list[str]:
    """The values as braille characters, `width` x `height` dots, neighbours connected."""
    low, spread = values.min(), np.ptp(values) or 1.0
    places = np.linspace(0, len(values), min(width, len(values)) + 1).astype(int)
    means = np.add.reduceat(values, places[:-1]) / np.diff(places)
    x = np.round(np.linspace(0, width - 1, len(means))).astype(int)
    y = np.round((1.0 - (means - low) / spread) * (height - 1)).astype(int)
    bits = np.zeros((height // 4, width // 2), int)
    heights = np.round(np.interp(np.arange(width), x, y)).astype(int)
    for column, (before, row) in enumerate(zip([heights[0], *heights], heights, strict=False)):
        for dot in range(min(before, row), max(before, row) + 1):
            bits[dot // 4, column // 2] |= _DOTS[dot % 4][column % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in bits]
