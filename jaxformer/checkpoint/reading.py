"""Parameters read from checkpoints in pieces, so that the host holds little more than one array."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxformer.errors import CheckpointError

PIECE = 2**22
"""The most bytes of an array that are stored, and read, as one piece."""

Shardings = Callable[[Any], Any]
"""shardings(tree of shapes) -> the tree of their `jax.sharding.Sharding`."""


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
    """What orbax knows of the arrays of the field `tree`: their names, shapes and dtypes."""
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
        here = tuple(
            slice(low - start, high - start)
            for (low, high), start in zip(corner, starts, strict=True)
        )
        if len(arrays) == 1:
            mean[here] = first[stored].read().result()
            continue
        total = np.zeros(mean[here].shape)
        for array in arrays:
            total += array[stored].read().result()
        mean[here] = total / len(arrays)
    return mean
