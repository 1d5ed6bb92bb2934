"""Leaves of a state in a checkpoint, as orbax stores and restores them.

Parameters alone are read in pieces, so that the host holds little more than one array.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxformer.errors import CheckpointError

PIECE = 2**22
"""The most bytes of an array that are stored, and read, as one piece."""

Shardings = Callable[[Any], Any]
"""shardings(tree of shapes) -> the tree of their `jax.sharding.Sharding`."""


def stored_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for `leaf`, with its sharding if it spans devices."""
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))


def storable(leaf: Any) -> jax.Array | np.ndarray:
    """`leaf` as an array of numbers; a typed PRNG key becomes its key data.

    The array is numpy's if this process holds all of it. For JAX's arrays orbax counts bytes before
    and after it stores them, and each count leaks memory in tensorstore 0.1.86: keys and lists that
    it makes of JSON. A leak of 300 bytes per array and save remains.
    """
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    numbers = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    is_here = not isinstance(numbers, jax.Array) or numbers.is_fully_addressable
    return np.asarray(numbers) if is_here else numbers


def restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    """Arguments for orbax to read a leaf with its sharding, or into a numpy array without one."""
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)


def as_given(leaf: Any, stored: Any) -> jax.Array:
    """The `stored` value as the same kind of array as `leaf`, where a committed `leaf` is.

    A step that was compiled for a committed state would be compiled again for another one.
    """
    array = _as_kind(leaf, stored)
    return jax.device_put(array, leaf.sharding) if getattr(leaf, "committed", False) else array


def _as_kind(leaf: Any, stored: Any) -> jax.Array:
    if not hasattr(leaf, "dtype") or not _is_key(leaf):
        return stored if isinstance(stored, jax.Array) else jnp.array(stored)
    impl, sharding = jax.random.key_impl(jnp.empty((), leaf.dtype)), _sharding(leaf)
    if sharding is None:
        return jax.random.wrap_key_data(jnp.array(stored), impl=impl)
    # Each process creates its part.
    data = jax.make_array_from_callback(stored.shape, sharding, lambda index: stored[index])
    return jax.random.wrap_key_data(data, impl=impl)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding of a leaf on several devices; on one device, JAX chooses the device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and len(sharding.device_set) > 1 else None


def read_mean(states: Sequence[Path], tree: str, shardings: Shardings | None = None) -> Any:
    """The mean of the field `tree` over the stored `states`, in the stored dtypes.

    Arrays are numpy's, or lie where `shardings` says, and each process reads its parts. Pieces are
    added up in float64. Raises `CheckpointError` for a state that lacks the field or is damaged.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(stored_arrays(states[0], tree))
    places: Iterable[Any] = [None] * len(leaves)
    if shardings is not None:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        places = structure.flatten_up_to(shardings(structure.unflatten(shapes)))
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 2 * PIECE}})
    means = []
    for leaf, place in zip(leaves, places, strict=True):
        with reading(states[0].parents[1]):
            arrays = [_open(state, leaf.name, context) for state in states]
            means.append(_mean(arrays, place))
    return structure.unflatten(means)


def stored_arrays(state: Path, tree: str) -> Any:
    """Orbax's metadata of the arrays of the field `tree`: names, shapes and dtypes."""
    with reading(state):
        stored = ocp.PyTreeCheckpointHandler().metadata(epath.Path(str(state))).tree
    if not stored.get(tree):
        raise CheckpointError(f"{state.parent} holds no {tree!r}")
    return stored[tree]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts errors of orbax and tensorstore about `path` to `CheckpointError`."""
    try:
        yield
    except (ValueError, OSError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error


def _open(state: Path, name: str, context: ts.Context) -> ts.TensorStore:
    """The array `name` of a state that orbax has stored; nothing of it is read yet."""
    info = ocp.type_handlers.ParamInfo(
        name=name, parent_dir=epath.Path(str(state)), is_ocdbt_checkpoint=True, ts_context=context
    )
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
    return ts.open(ts.Spec(spec), context=context, open=True).result()


def _mean(arrays: Sequence[ts.TensorStore], place: jax.sharding.Sharding | None) -> Any:
    """The mean of `arrays` in numpy, or where `place` says."""
    shape = tuple(arrays[0].shape)
    if place is None:
        return _mean_of_part(arrays, tuple(map(slice, shape)))

    def read(part: Any) -> np.ndarray:
        return _mean_of_part(arrays, part)

    placed = jax.make_array_from_callback(shape, place, read)
    return jax.block_until_ready(placed)  # the host's copy goes before the next array is read


def _mean_of_part(arrays: Sequence[ts.TensorStore], part: tuple[slice, ...]) -> np.ndarray:
    """The mean of `arrays` at the indices of `part`, computed piece by piece as they are stored."""
    first = arrays[0]
    starts, spans = [], []
    pieces: Any = first.chunk_layout.read_chunk.shape or ()  # None of a scalar
    for of_axis, size, piece in zip(part, first.shape, pieces, strict=True):
        start, stop, _ = of_axis.indices(size)
        starts.append(start)
        spans.append([*pairwise([start, *range((start // piece + 1) * piece, stop, piece), stop])])
    mean = np.empty([span[-1][1] - span[0][0] for span in spans], first.dtype.numpy_dtype)
    for corner in product(*spans):
        stored = tuple(slice(low, high) for low, high in corner)
        within_piece = tuple(
            slice(low - start, high - start)
            for (low, high), start in zip(corner, starts, strict=True)
        )
        if len(arrays) == 1:
            mean[within_piece] = first[stored].read().result()
            continue
        total = np.zeros(mean[within_piece].shape)
        for array in arrays:
            total += array[stored].read().result()
        mean[within_piece] = total / len(arrays)
    return mean
