"""The positional encoding matrix: `python -m experiments.embeddings.positions --d_model 3`.

Row pos is what is added to the embedding of the token at position pos.
"""

import sys
from dataclasses import dataclass

import numpy as np

from experiments import commands
from jaxformer.config import check_least
from jaxformer.positions import sinusoidal_positions


@dataclass(frozen=True)
class PositionOptions:
    """The sizes of the matrix, to how many decimals it is shown, and where to keep it (.npy)."""

    d_model: int = 3
    length: int = 5
    decimals: int = 2
    output: str = ""

    def __post_init__(self):
        check_least(self, 1, "d_model", "length")
        check_least(self, 0, "decimals")


def add_positions(embeddings: np.ndarray) -> np.ndarray:
    """`embeddings` [T, D] with the encoding of its position added to each row."""
    return embeddings + sinusoidal_positions(*embeddings.shape)


def shift(d_model: int, distance: int) -> np.ndarray:
    """The matrix M [D, D], float64, by which PE(pos + distance) = M PE(pos) at every pos.

    It turns each pair (sin, cos) by its own angle: a position is a linear function of any other,
    which is why the paper chose them (Vaswani et al. 2017, 3.5). `d_model` is even.
    """
    matrix = np.zeros((d_model, d_model))
    for i in range(0, d_model, 2):
        angle = distance * 10_000.0 ** (-i / d_model)
        sin, cos = np.sin(angle), np.cos(angle)
        matrix[i : i + 2, i : i + 2] = [[cos, sin], [-sin, cos]]
    return matrix


def rows(matrix: np.ndarray, decimals: int) -> list[str]:
    """A line for each row of `matrix`, rounded."""
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
    options = {"default": PositionOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
