"""Leaves of a training state as orbax stores and restores them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


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
