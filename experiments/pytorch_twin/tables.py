"""Weights carried between our trees and torch's state dicts, by one table used in both directions.

A table is a list of rows *their name, our paths, transform*. Everything here is numpy: a state
dict is {name: array}, as `{name: t.numpy() for name, t in module.state_dict().items()}` makes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import ConfigError

State = Mapping[str, np.ndarray]


class Transform(NamedTuple):
    """How arrays of ours become one of theirs, and back."""

    to_theirs: Callable[[Sequence[np.ndarray]], np.ndarray]
    to_ours: Callable[[np.ndarray], Sequence[np.ndarray]]


class Row(NamedTuple):
    """One array of theirs, and the path of each of ours that it is made of."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform


def same() -> Transform:
    """The array as it is."""
    return Transform(lambda arrays: arrays[0], lambda array: [array])


def kernel() -> Transform:
    """Ours [inputs, outputs], theirs [outputs, inputs]."""
    return Transform(lambda arrays: arrays[0].T, lambda array: [array.T])


def into_heads(heads: int, parts: int = 1) -> Transform:
    """`parts` kernels [D, N, H] of ours, in theirs one [parts N H, D]."""

    def split(array: np.ndarray) -> list[np.ndarray]:
        return [part.T.reshape(part.shape[1], heads, -1) for part in np.split(array, parts)]

    return Transform(
        lambda arrays: np.concatenate([array.reshape(len(array), -1).T for array in arrays]),
        split,
    )


def bias_of_heads(heads: int, parts: int = 1) -> Transform:
    """`parts` biases [N, H] of ours, in theirs one [parts N H]."""
    return Transform(
        lambda arrays: np.concatenate([array.reshape(-1) for array in arrays]),
        lambda array: [part.reshape(heads, -1) for part in np.split(array, parts)],
    )


def out_of_heads(heads: int) -> Transform:
    """A kernel [N, H, D] of ours, in theirs [D, N H]."""
    return Transform(
        lambda arrays: arrays[0].reshape(-1, arrays[0].shape[-1]).T,
        lambda array: [array.T.reshape(heads, -1, len(array))],
    )


def linear(theirs: str, ours: str, *, bias: bool = True) -> list[Row]:
    """The rows of a linear map."""
    rows = [Row(f"{theirs}.weight", (f"{ours}/kernel",), kernel())]
    return rows + ([Row(f"{theirs}.bias", (f"{ours}/bias",), same())] if bias else [])


def norm(theirs: str, ours: str, *, bias: bool = True) -> list[Row]:
    """The rows of a LayerNorm."""
    rows = [Row(f"{theirs}.weight", (f"{ours}/scale",), same())]
    return rows + ([Row(f"{theirs}.bias", (f"{ours}/bias",), same())] if bias else [])


def out(theirs: str, ours: str, heads: int, *, bias: bool = True) -> list[Row]:
    """The rows of the map out of the heads."""
    rows = [Row(f"{theirs}.weight", (f"{ours}/kernel",), out_of_heads(heads))]
    return rows + ([Row(f"{theirs}.bias", (f"{ours}/bias",), same())] if bias else [])


def to_theirs(params: Any, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The state dict that holds the tree `params`.

    Raises `ConfigError`, which lists them, for leaves that are missing or have no row.
    """
    leaves = _flat(params)
    _check_names(leaves, [path for row in rows for path in row.ours], "the parameters")
    return {
        row.theirs: row.transform.to_theirs([np.asarray(leaves[path]) for path in row.ours])
        for row in rows
    }


def to_ours(state: State, rows: Sequence[Row]) -> dict[str, Any]:
    """The tree of parameters that holds `state`.

    Raises `ConfigError`, which lists them, for names that are missing or have no row, and for an
    array that the number of heads does not divide.
    """
    _check_names(state, [row.theirs for row in rows], "the state dict")
    params: dict[str, Any] = {}
    for row in rows:
        try:
            arrays = row.transform.to_ours(np.asarray(state[row.theirs]))
        except ValueError as error:
            raise ConfigError(
                f"{row.theirs} has shape {list(np.shape(state[row.theirs]))}, which does not make "
                f"{' and '.join(row.ours)}: give the number of heads it was made with ({error})"
            ) from error
        for path, array in zip(row.ours, arrays, strict=True):
            _put(params, path.split("/"), array)
    return params


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    start = f"{prefix}/" if prefix else ""
    return {k: v for name in tree for k, v in _flat(tree[name], start + name).items()}


def _put(tree: dict[str, Any], path: list[str], leaf: np.ndarray) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def _check_names(found: Mapping[str, Any], wanted: Sequence[str], where: str) -> None:
    wrong = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    wrong += [f"{name} is unknown" for name in sorted(set(found) - set(wanted))]
    if wrong:
        raise ConfigError(
            f"{where} does not fit the table: {'; '.join(wrong)}: give the weights of the module "
            "that the table is of"
        )
