"""Prints the positional encoding matrix: `python -m experiments.examples.embeddings.positions`.

Row pos is added to the embedding of the token at position pos.
"""

from dataclasses import dataclass

import numpy as np

from experiments.harness import cli
from jaxformer.config import check_at_least
from jaxformer.nn.positions import sinusoidal_positions


@dataclass(frozen=True)
class PositionOptions:
    """The sizes of the matrix and its output."""

    d_model: int = 3
    """Columns of the matrix: the size of a token's vector."""
    length: int = 5
    """Rows of the matrix: the number of positions."""
    decimals: int = 2
    """Decimals of the printed numbers."""
    output: str = ""
    """File (.npy) that receives the matrix. Empty: none."""

    def __post_init__(self):
        check_at_least(self, 1, "d_model", "length")
        check_at_least(self, 0, "decimals")


def add_positions(embeddings: np.ndarray) -> np.ndarray:
    """Returns `embeddings` [T, D] plus the encoding of each row's position."""
    return embeddings + sinusoidal_positions(*embeddings.shape)


def shift(d_model: int, distance: int) -> np.ndarray:
    """Returns the matrix M [D, D], float64, with PE(pos + distance) = M PE(pos) for every pos.

    M rotates each pair (sin, cos) by its own angle. The paper chose sines because M exists
    (Vaswani et al. 2017, 3.5). `d_model` is even.
    """
    matrix = np.zeros((d_model, d_model))
    for i in range(0, d_model, 2):
        angle = distance * 10_000.0 ** (-i / d_model)
        sin, cos = np.sin(angle), np.cos(angle)
        matrix[i : i + 2, i : i + 2] = [[cos, sin], [-sin, cos]]
    return matrix


def rows(matrix: np.ndarray, decimals: int) -> list[str]:
    """Returns a line of rounded numbers for each row of `matrix`."""
    width = decimals + 4
    return [" ".join(f"{value + 0.0:{width}.{decimals}f}" for value in row) for row in matrix]


def main(options: PositionOptions) -> None:
    """Prints the matrix, and writes it."""
    matrix = sinusoidal_positions(options.length, options.d_model)
    print("\n".join(rows(matrix, options.decimals)))
    if options.output:
        with open(options.output, "wb") as file:
            np.save(file, matrix)


if __name__ == "__main__":
    cli.start(main, {"default": PositionOptions()}, __doc__)
