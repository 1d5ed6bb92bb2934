"""Reversible changes of shape and scale between our parameters and tensors of `transformers`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Transform(NamedTuple):
    """A change of form in both directions; `jax` is our parameter, `hf` the tensor."""

    shape: Callable[[Shape], Shape]
    """Our shape -> the shape of the tensor."""
    to_hf: Callable[[np.ndarray], np.ndarray]
    """Our parameter -> the tensor."""
    to_jax: Callable[[np.ndarray, Shape], np.ndarray]
    """The tensor and our shape -> our parameter."""


SAME = Transform(
    shape=lambda jax: jax,
    to_hf=lambda array: array,
    to_jax=lambda array, shape: array.reshape(shape),
)
"""No change."""

FLAT = Transform(
    shape=lambda jax: (math.prod(jax),),
    to_hf=lambda array: array.reshape(-1),
    to_jax=lambda array, shape: array.reshape(shape),
)
"""All axes in one, such as a bias [N, H] stored as [N H]."""


def conv1d(inputs: int = 1) -> Transform:
    """A kernel stored as [in, out]; its first `inputs` axes are those of the input."""
    return Transform(
        shape=lambda jax: (math.prod(jax[:inputs]), math.prod(jax[inputs:])),
        to_hf=lambda array: array.reshape(math.prod(array.shape[:inputs]), -1),
        to_jax=lambda array, shape: array.reshape(shape),
    )


def linear(inputs: int = 1) -> Transform:
    """A kernel stored as [out, in]; its first `inputs` axes are those of the input."""
    plain = conv1d(inputs)
    return Transform(
        shape=lambda jax: plain.shape(jax)[::-1],
        to_hf=lambda array: plain.to_hf(array).T,
        to_jax=lambda array, shape: plain.to_jax(array.T, shape),
    )


def scaled(transform: Transform, factor: float) -> Transform:
    """`transform` of a parameter that is `factor` times the tensor."""
    scale = np.float32(factor)
    return Transform(
        shape=transform.shape,
        to_hf=lambda array: transform.to_hf(array / scale),
        to_jax=lambda array, shape: transform.to_jax(array * scale, shape),
    )
