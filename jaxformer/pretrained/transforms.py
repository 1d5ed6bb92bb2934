"""How others write one parameter of ours: reversible changes of shape and scale, in numpy."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Transform(NamedTuple):
    """A change of form, in both directions.

    `shape` is their shape for ours; `to_ours` is given the shape that it has to yield.
    """

    shape: Callable[[Shape], Shape]
    to_theirs: Callable[[np.ndarray], np.ndarray]
    to_ours: Callable[[np.ndarray, Shape], np.ndarray]


SAME = Transform(
    shape=lambda ours: ours,
    to_theirs=lambda array: array,
    to_ours=lambda array, shape: array.reshape(shape),
)
"""The same in both."""

FLAT = Transform(
    shape=lambda ours: (math.prod(ours),),
    to_theirs=lambda array: array.reshape(-1),
    to_ours=lambda array, shape: array.reshape(shape),
)
"""All axes of ours in one of theirs, such as a bias [N, H] written as [N H]."""


def conv1d(inputs: int = 1) -> Transform:
    """A kernel whose first `inputs` axes are what comes in, written as [in, out]."""
    return Transform(
        shape=lambda ours: (math.prod(ours[:inputs]), math.prod(ours[inputs:])),
        to_theirs=lambda array: array.reshape(math.prod(array.shape[:inputs]), -1),
        to_ours=lambda array, shape: array.reshape(shape),
    )


def linear(inputs: int = 1) -> Transform:
    """A kernel whose first `inputs` axes are what comes in, written as [out, in]."""
    plain = conv1d(inputs)
    return Transform(
        shape=lambda ours: plain.shape(ours)[::-1],
        to_theirs=lambda array: plain.to_theirs(array).T,
        to_ours=lambda array, shape: plain.to_ours(array.T, shape),
    )


def scaled(transform: Transform, factor: float) -> Transform:
    """`transform` of a parameter that is `factor` times theirs."""
    factor = np.float32(factor)
    return Transform(
        shape=transform.shape,
        to_theirs=lambda array: transform.to_theirs(array / factor),
        to_ours=lambda array, shape: transform.to_ours(array * factor, shape),
    )
