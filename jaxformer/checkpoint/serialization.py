"""Converts the leaves of a state to arrays that can be stored, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxformer.training.parameters import flatten

_NAMED = 5  # an error names so many parameters and counts the rest


def storable(leaf: Any) -> jax.Array | np.ndarray:
    """`leaf` as an array of numbers; a typed PRNG key becomes its key data.

    The array is numpy's if this process holds all of it. For JAX's arrays orbax counts bytes before
    and after it stores them, and each count leaks memory in tensorstore 0.1.86: keys and lists that
    it makes of JSON. A leak of 300 bytes per array and save remains.
    """
    if not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    numbers = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.asarray(numbers) if numbers.is_fully_addressable else numbers


def stored_as(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for `leaf`, with its sharding if it spans devices."""
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))


def restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    """Arguments for orbax to read a leaf with its sharding, or into a numpy array without one."""
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)


def as_given(leaf: Any, value: Any) -> jax.Array:
    """The stored `value` as the same kind of array as `leaf`."""
    if not hasattr(leaf, "dtype") or not _is_key(leaf):
        return value if isinstance(value, jax.Array) else jnp.array(value)
    impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
    sharding = _sharding(leaf)
    if sharding is not None and not sharding.is_fully_addressable:  # each process creates its part
        data = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        return jax.random.wrap_key_data(data, impl=impl)
    keys = jax.random.wrap_key_data(jnp.array(value), impl=impl)
    return keys if sharding is None else jax.device_put(keys, sharding)


def shapes(tree: Any) -> dict[str, str]:
    """{"path/of/leaf": "dtype[shape]"}."""
    return {
        path: f"{jnp.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in flatten(tree).items()
    }


def differences(stored: dict[str, str], given: dict[str, str]) -> str:
    """The missing, extra and different leaves, parameters first; "" if there are none."""
    wrong = [
        f"{path} is {stored.get(path, 'absent')} in the checkpoint but "
        f"{given.get(path, 'absent')} here"
        for path in sorted(given.keys() | stored.keys(), key=_params_first)
        if given.get(path) != stored.get(path)
    ]
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return "; ".join(wrong[:_NAMED]) + more


def _params_first(path: str) -> tuple[bool, str]:
    return not path.startswith("params/"), path


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding of a leaf on several devices; on one device, JAX chooses the device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and len(sharding.device_set) > 1 else None
