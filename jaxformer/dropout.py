"""Dropout whose mask belongs to the row, not to the device, the batch shape or the slice."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Noise(NamedTuple):
    """The randomness of one step: two words of its rng and the global row numbers.

    Passing None in its place switches dropout off. The mask is a hash of (rng, site, row, position,
    feature): the same on one device, under accumulation, on a mesh and on several
    hosts, and about 1 ns an element on a CPU (threefry: 27).
    """

    words: jax.Array  # [2] uint32
    row: jax.Array  # [B] int32

    @classmethod
    def of(cls, rng: jax.Array, row: jax.Array) -> "Noise":
        """The noise of a step's `rng` (a typed key) for the rows numbered `row` [B]."""
        words = jax.random.key_data(rng).astype(jnp.uint32)
        return cls(words.reshape(-1)[:2], row)

    def keep(
        self,
        site: str,
        shape: tuple[int, ...],
        rate: float,
        start: tuple[jax.Array | int, ...] | None = None,
    ) -> jax.Array:
        """bool `shape` [B, ..., F], each True with probability 1 - `rate`.

        An element depends on its own indices only: a wider or longer array repeats the mask, and
        `start`, the indices of the first element behind B (numbers or int32 scalars, None: zeros),
        gives the part of a larger array's mask that begins there.
        """
        start = (0,) * (len(shape) - 1) if start is None else start
        site_word = np.uint32(zlib.crc32(site.encode()))
        key = _mix(_mix(self.words[0] ^ site_word) + self.row.astype(jnp.uint32) * _ODD)
        for size, first in zip(shape[1:-1], start[:-1], strict=True):
            key = _mix(_numbered(key, size, first))
        # Two rounds with two keys: one alone leaves masks of neighbouring keys correlated.
        second = _mix(key ^ self.words[1])
        hashed = _mix(_mix(_numbered(key, shape[-1], start[-1])) ^ second[..., None])
        return hashed < np.uint32(min((1.0 - rate) * 2.0**32, 2.0**32 - 1))


class Dropout(NamedTuple):
    """Dropout at one place of the model: its noise, its site's name and its rate."""

    noise: Noise | None
    site: str
    rate: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` [B, ..., F] with a share `rate` set to zero and the rest scaled by 1/(1 - rate)."""
        if self.noise is None or self.rate == 0.0:
            return x
        keep = self.noise.keep(self.site, x.shape, self.rate)
        return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - self.rate), x.dtype), 0)


_ODD = np.uint32(0x9E3779B9)


def _numbered(key: jax.Array, size: int, first: jax.Array | int) -> jax.Array:
    """`size` different words [..., size] from each of `key` [...], numbered from `first`."""
    number = (jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(first, jnp.uint32)) * _ODD
    return key[..., None] + number.reshape((1,) * key.ndim + (size,))


def _mix(x: jax.Array) -> jax.Array:
    """The 32-bit finaliser of MurmurHash3: every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
