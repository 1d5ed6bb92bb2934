"""A state as what is stored of it, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_NAMED = 5  # parameters named in an error before the rest is only counted


def storable(leaf: Any) -> jax.Array | np.ndarray:
    """`leaf` as an array of numbers: a typed PRNG key as its key data.

    It is numpy's where this process holds all of it. Of JAX's arrays orbax counts the bytes before
    and after it stores them, and each count is memory that tensorstore 0.1.86 never frees: keys
    and lists that it makes of JSON. What is left of that leak is 300 bytes an array and save.
    """
    if not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    numbers = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.asarray(numbers) if numbers.is_fully_addressable else numbers


def stored_as(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for `leaf`, and its sharding if it spans devices."""
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_spread(leaf))


def restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    """How to read a leaf: spread as its sharding says, or whole into numpy."""
    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape)


def as_given(leaf: Any, value: Any) -> jax.Array:
    """The stored `value` as the kind of array that `leaf` is."""
    if not hasattr(leaf, "dtype") or not _is_key(leaf):
        return value if isinstance(value, jax.Array) else jnp.array(value)
    impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
    sharding = _spread(leaf)
    if sharding is not None and not sharding.is_fully_addressable:  # each process gives its part
        data = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
        return jax.random.wrap_key_data(data, impl=impl)
    keys = jax.random.wrap_key_data(jnp.array(value), impl=impl)
    return keys if sharding is None else jax.device_put(keys, sharding)


def shapes(tree: Any) -> dict[str, str]:
    """`path/of/leaf` -> `dtype[shape]`."""
    return {
        path: f"{jnp.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()
    }


def differences(stored: dict[str, str], given: dict[str, str]) -> str:
    """What is absent, left over or another `dtype[shape]`, parameters first; "" when nothing is."""
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


def _spread(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding of a leaf on several devices; on one, JAX shall choose the device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and len(sharding.device_set) > 1 else None
