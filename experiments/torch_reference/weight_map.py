"""Converts weights between jaxformer's parameter trees and torch's state dicts, by one map.

A map is a list of entries *torch name, jaxformer's paths, transform*. All arrays are numpy's: a
state dict is {name: array}, as in `{name: t.numpy() for name, t in module.state_dict().items()}`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer.errors import ConfigError
from jaxformer.training.parameters import flatten

State = Mapping[str, np.ndarray]


class Transform(NamedTuple):
    """How jaxformer's arrays become one of torch's, and back."""

    to_torch: Callable[[Sequence[np.ndarray]], np.ndarray]
    to_jax: Callable[[np.ndarray], Sequence[np.ndarray]]


class Entry(NamedTuple):
    """One array of torch's, and jaxformer's paths that it consists of."""

    torch_name: str
    jax_paths: tuple[str, ...]
    transform: Transform


def same() -> Transform:
    """The array is unchanged."""
    return Transform(lambda arrays: arrays[0], lambda array: [array])


def kernel() -> Transform:
    """jaxformer's [inputs, outputs], torch's [outputs, inputs]."""
    return Transform(lambda arrays: arrays[0].T, lambda array: [array.T])


def into_heads(heads: int, parts: int = 1) -> Transform:
    """`parts` kernels [D, N, H] of jaxformer, torch's one [parts N H, D]."""

    def split(array: np.ndarray) -> list[np.ndarray]:
        return [part.T.reshape(part.shape[1], heads, -1) for part in np.split(array, parts)]

    return Transform(
        lambda arrays: np.concatenate([array.reshape(len(array), -1).T for array in arrays]),
        split,
    )


def bias_of_heads(heads: int, parts: int = 1) -> Transform:
    """`parts` biases [N, H] of jaxformer, torch's one [parts N H]."""
    return Transform(
        lambda arrays: np.concatenate([array.reshape(-1) for array in arrays]),
        lambda array: [part.reshape(heads, -1) for part in np.split(array, parts)],
    )


def out_of_heads(heads: int) -> Transform:
    """A kernel [N, H, D] of jaxformer, torch's [D, N H]."""
    return Transform(
        lambda arrays: arrays[0].reshape(-1, arrays[0].shape[-1]).T,
        lambda array: [array.T.reshape(heads, -1, len(array))],
    )


def linear(prefix: str, scope: str, *, bias: bool = True) -> list[Entry]:
    """Returns the entries of a linear layer."""
    return _layer(prefix, f"{scope}/kernel", kernel(), f"{scope}/bias", bias)


def norm(prefix: str, scope: str, *, bias: bool = True) -> list[Entry]:
    """Returns the entries of a LayerNorm."""
    return _layer(prefix, f"{scope}/scale", same(), f"{scope}/bias", bias)


def out(prefix: str, scope: str, heads: int, *, bias: bool = True) -> list[Entry]:
    """Returns the entries of attention's output projection."""
    return _layer(prefix, f"{scope}/kernel", out_of_heads(heads), f"{scope}/bias", bias)


def _layer(
    prefix: str, weight_path: str, weight: Transform, bias_path: str, bias: bool
) -> list[Entry]:
    entries = [Entry(f"{prefix}.weight", (weight_path,), weight)]
    return entries + ([Entry(f"{prefix}.bias", (bias_path,), same())] if bias else [])


def to_torch(params: Any, entries: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Returns the state dict of the tree `params`.

    Raises `ConfigError` that lists the leaves that are missing or have no entry.
    """
    leaves = flatten(params)
    _check_names(leaves, [path for entry in entries for path in entry.jax_paths], "the parameters")
    return {
        entry.torch_name: entry.transform.to_torch([np.asarray(leaves[p]) for p in entry.jax_paths])
        for entry in entries
    }


def to_jax(state: State, entries: Sequence[Entry]) -> dict[str, Any]:
    """Returns the tree of parameters of `state`.

    Raises `ConfigError` that lists the names that are missing or have no entry, and for an array
    that the number of heads does not divide.
    """
    _check_names(state, [entry.torch_name for entry in entries], "the state dict")
    leaves: dict[str, np.ndarray] = {}
    for entry in entries:
        try:
            arrays = entry.transform.to_jax(np.asarray(state[entry.torch_name]))
        except ValueError as error:
            raise ConfigError(
                f"{entry.torch_name} of shape {list(np.shape(state[entry.torch_name]))} does not "
                f"make {' and '.join(entry.jax_paths)}: give the number of heads of the module "
                f"({error})"
            ) from error
        leaves |= zip(entry.jax_paths, arrays, strict=True)
    return unflatten_dict(leaves, sep="/")


def _check_names(found: Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    wrong = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    wrong += [f"{name} is unknown" for name in sorted(set(found) - set(wanted))]
    if wrong:
        raise ConfigError(
            f"{where} does not fit the weight map: {'; '.join(wrong)}: give the weights of the "
            "module that the map was made for"
        )
