"""Parameters on their way into a file of safetensors: one tensor at a time is on the host."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.distributed.processes import to_numpy
from jaxformer.pretrained.weight_map import Shape

_PIECE = 2**20
"""The bytes of a tensor that are written at once."""


class LazyLeaf:
    """A parameter, or one layer of it, that comes to the host when it is read."""

    def __init__(self, stored: Any, index: tuple[int, ...] = ()) -> None:
        self._stored, self._index = stored, index

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, layer: int) -> "LazyLeaf":
        return LazyLeaf(self._stored, (layer,))

    def read(self) -> np.ndarray:
        """The array in float32."""
        leaf = self._stored[self._index] if self._index else self._stored
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf, np.float32)
        if not leaf.is_fully_addressable:
            return np.asarray(to_numpy(leaf), np.float32)
        whole = np.empty(leaf.shape, np.float32)
        for shard in leaf.addressable_shards:
            part = whole[shard.index]
            for rows in _pieces(part):  # JAX's array keeps a copy of all that numpy reads
                part[rows] = shard.data[rows]
        return whole


def write_tensors(
    path: Path, sizes: Mapping[str, Shape], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes `tensors` in float32 one by one; they come in the order of their names.

    The file is, to the byte, what the library `safetensors` writes, which takes all at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(sizes):
        start, end = end, end + 4 * math.prod(sizes[name])
        header[name] = {"dtype": "F32", "shape": sizes[name], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            for rows in _pieces(tensor):  # a transposed one is copied in pieces
                file.write(np.ascontiguousarray(tensor[rows]).data)
            del tensor  # before the next one is read


def _pieces(array: np.ndarray) -> Iterator[slice]:
    """Slices of the first axis that are about `_PIECE` bytes each."""
    rows = max(_PIECE * len(array) // max(array.nbytes, 1), 1)
    return (slice(first, first + rows) for first in range(0, len(array), rows))
