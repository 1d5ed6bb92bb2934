"""Dropout whose mask depends on the example, not on the device, the batch or the slice."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from jaxformer.ops.partitioning import device_axes


class DropoutRng(struct.PyTreeNode):
    """The randomness of one step: its key, and the global ids of the examples.

    Without one (None) there is no dropout. A mask is a hash of (key, name, example id, position,
    feature). It is therefore the same on one device, with gradient accumulation, on any mesh and on
    any number of hosts. On a CPU it takes about 1 ns per element (threefry: 27).

    >>> def mask(example_ids):
    ...     rng = jf.DropoutRng(jax.random.key(0), jnp.array(example_ids))
    ...     return rng.keep_mask("input", (len(example_ids), 5), rate=0.5)
    >>> mask([7, 8]).shape
    (2, 5)
    >>> bool((mask([7, 8])[1] == mask([8])[0]).all())  # the mask of example 8 in any batch
    True
    """

    key: Array
    """A key of jax.random; 64 of its bits are used."""
    example_ids: Int[Array, " B"]
    layer: Array | None = None
    """In a scan over blocks, the index of the layer."""
    path: str = struct.field(pytree_node=False, default="")
    """The path of the scanned block, which stands for one of `paths`."""
    paths: tuple[str, ...] = struct.field(pytree_node=False, default=())

    def in_scan(self, path: str, paths: tuple[str, ...], index: Array) -> "DropoutRng":
        """The randomness in step `index` of a scan: `path` in a name stands for `paths[index]`.

        The same modules without a scan have the same masks.
        """
        return self.replace(layer=index, path=path, paths=paths)

    def name_word(self, name: str) -> UInt32[Array, ""] | np.uint32:
        """The hash of the name of a place in the model."""
        if self.layer is None:
            return np.uint32(zlib.crc32(name.encode()))
        words = [zlib.crc32(name.replace(self.path, one, 1).encode()) for one in self.paths]
        return jnp.asarray(np.array(words, np.uint32))[self.layer]

    def keep_mask(
        self,
        name: str,
        shape: tuple[int, ...],
        rate: float,
        start: tuple[Array | int, ...] | None = None,
    ) -> Array:
        """bool `shape` [B, ..., F]: each element is True with probability 1 - `rate`.

        An element depends only on its own indices, so a wider or longer array repeats the mask.
        `start` gives the indices, after B, of the first element (numbers or int32 scalars; None:
        zeros): the result is that slice of a larger array's mask. `name` is the place in the model.
        """
        start = (0,) * (len(shape) - 1) if start is None else start
        words = self.row_words(name, shape[:-1], start[:-1])
        return keep_columns(words[0], words[1], shape[-1], start[-1], rate)

    def uniform(self, name: str, shape: tuple[int, ...]) -> Float[Array, "B ... F"]:
        """Numbers in [0, 1) of `shape`, each from its own indices, as in `keep_mask`."""
        words = self.row_words(name, shape[:-1])
        column = jnp.arange(shape[-1], dtype=jnp.uint32)
        column = column.reshape((1,) * (len(shape) - 1) + shape[-1:])
        bits = hash_elements(words[0][..., None], words[1][..., None], column)
        return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)

    def row_words(
        self, name: str, shape: tuple[int, ...], start: tuple[Array | int, ...] | None = None
    ) -> UInt32[Array, "2 B ..."]:
        """Two words of each row of a mask, from which `keep_columns` computes its elements.

        `shape` is the mask's without its last axis, and `start` is as in `keep_mask`.
        """
        start = (0,) * (len(shape) - 1) if start is None else start
        words = key_words(self.key)
        name_word = self.name_word(name)
        key = _mix(_mix(words[0] ^ name_word) + self.example_ids.astype(jnp.uint32) * _ODD)
        for size, first in zip(shape[1:], start, strict=True):
            key = _mix(_numbered(key, size, first))
        # Two rounds with two keys: after one round, masks of neighbouring keys are correlated.
        return jnp.stack([key, _mix(key ^ words[1])])


def key_words(key: Array) -> UInt32[Array, "2"]:
    """Two words of a key of any kind, typed or not; `ValueError` for several keys."""
    words = jax.random.key_data(key)
    if words.ndim != 1:
        raise ValueError(
            f"the rng has the shape {key.shape}, but must be one key: the ids of the examples tell "
            "them apart"
        )
    return words.astype(jnp.uint32)[:2]


def as_dropout_rng(rng: DropoutRng | Array | None, x: Float[Array, "B ..."]) -> DropoutRng | None:
    """`rng`; of a key alone, the randomness of the rows of `x`, whose ids are 0 to B - 1.

    Raises `ValueError` for another number of ids than rows, and `TypeError` for anything else.
    """
    if rng is None:
        return None
    if isinstance(rng, DropoutRng):
        if jnp.shape(rng.example_ids) != (len(x),):
            raise ValueError(
                f"example_ids has the shape {jnp.shape(rng.example_ids)}, but x has {len(x)} rows, "
                "each of which draws its own mask: give DropoutRng an id for each row"
            )
        return rng
    if isinstance(rng, Array) and _is_key(rng):
        return DropoutRng(key_of_device(rng, x), jnp.arange(len(x)))
    raise TypeError(
        f"dropout_rng is a {type(rng).__name__}, but must be a key of jax.random, or "
        "DropoutRng(key, example_ids)"
    )


def _is_key(array: Array) -> bool:
    """Whether `array` is a key of `jax.random`, typed or not."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or array.dtype == jnp.uint32


def key_of_device(key: Array, x: Float[Array, "B ..."]) -> Array:
    """A key that differs between the devices of `jax.shard_map` or `jax.pmap` whose `x` differs.

    Each device numbers its rows from 0, so one key for all would drop the same elements everywhere.
    Where JAX does not know where `x` differs, each device has a key of its own (`device_axes`).
    """
    axes = device_axes(x)
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def keep_columns(
    key: UInt32[Array, "*R"],
    second: UInt32[Array, "*R"],
    size: int,
    first: Array | int,
    rate: float,
) -> Bool[Array, "*R size"]:
    """The `size` columns from `first` on of a mask, given the two words of each of its rows."""
    column = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(first, jnp.uint32)
    column = column.reshape((1,) * key.ndim + (size,))
    return keep_elements(key[..., None], second[..., None], column, rate)


def keep_elements(
    key: UInt32[Array, "..."],
    second: UInt32[Array, "..."],
    column: UInt32[Array, "..."],
    rate: float,
) -> Bool[Array, "..."]:
    """The elements of a mask in these columns, given the two words of their rows; all broadcast.

    Pallas kernels compute their block of a mask with it.
    """
    hashed = hash_elements(key, second, column)
    return hashed < np.uint32(min((1.0 - rate) * 2.0**32, 2.0**32 - 1))


def hash_elements(
    key: UInt32[Array, "..."], second: UInt32[Array, "..."], column: UInt32[Array, "..."]
) -> UInt32[Array, "..."]:
    """32 random bits for each column, given the two words of its row; all broadcast."""
    return _mix(_mix(key + column * _ODD) ^ second)


class DropoutMask(NamedTuple):
    """Dropout at the place called `name` in the model."""

    dropout_rng: DropoutRng
    name: str
    rate: float

    def __call__(self, x: Float[Array, "B ... F"]) -> Float[Array, "B ... F"]:
        """`x` with a share `rate` of its elements set to zero.

        The kept elements are multiplied by 1/(1 - rate).
        """
        keep = self.dropout_rng.keep_mask(self.name, x.shape, self.rate)
        # A product, not a choice between x and 0: after that, XLA on a CPU recomputes the sums and
        # masks of all earlier blocks in each gradient of a post-norm model.
        return x * jnp.where(keep, jnp.asarray(1.0 / (1.0 - self.rate), x.dtype), 0)


_ODD = np.uint32(0x9E3779B9)  # 2^32 divided by the golden ratio


def _numbered(
    key: UInt32[Array, "..."], size: int, first: Array | int
) -> UInt32[Array, "... size"]:
    """`size` different words from each word of `key`, numbered from `first`."""
    number = (jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(first, jnp.uint32)) * _ODD
    return key[..., None] + number.reshape((1,) * key.ndim + (size,))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The 32-bit finaliser of MurmurHash3: every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
