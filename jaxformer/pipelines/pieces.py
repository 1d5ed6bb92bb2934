"""Compiled pieces of a pipeline, on the devices that have a model's parameters."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxformer.distributed import Strategy, strategy_of

_NO_MESH = Mesh(np.empty((), object), ())


def compile_piece(
    devices: Strategy, model: Any, params: Any, jitted: Any, *arrays: Any, **static: Any
) -> Callable[..., Any]:
    """`jitted(model, params, *arrays, **static)` as a function of `arrays`, on `devices`.

    These have `params`. For one device it is compiled here, under the caller's settings of JAX,
    which threads do not share; a mesh that the caller has set is left out.
    """
    if devices.mesh.size > 1 or jax.config.jax_disable_jit:  # type: ignore[attr-defined]

        def run(*arrays: Any) -> Any:
            with only_on(devices):
                return jitted(model, params, *arrays, **static)

        return run
    device = devices.mesh.devices.flat[0]
    # Shapes, because arrays remember the mesh of the program that made them: one program for all.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, arrays))
    with jax.default_device(device), only_on(devices):
        compiled = jitted.lower(model, shapes[0], *shapes[1], **static).compile()

    def place(leaf: Any) -> Any:
        """Numpy arrays are copied here, not within the call: `jax.transfer_guard` allows that."""
        if isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, device, may_alias=False)

    return lambda *arrays: compiled(params, *jax.tree.map(place, arrays))


def only_on(devices: Strategy) -> AbstractContextManager[Any]:
    """Within it programs are traced for these devices, whatever mesh the caller has set."""
    return jax.set_mesh(devices.mesh if devices.mesh.size > 1 else _NO_MESH)


def place_params(params: Any) -> Any:
    """`params` on the devices that have them, or on the first one, as compiled pieces take them.

    Numpy arrays are copied there. Arrays on a mesh with explicit axes are given XLA's.
    """
    leaves = jax.tree.leaves(params)
    if all(isinstance(leaf, jax.Array) and not _is_explicit(leaf) for leaf in leaves):
        return params
    return strategy_of(params).shard_state(params)


def _is_explicit(array: jax.Array) -> bool:
    """Whether `array` is on a mesh whose axes are parts of its type."""
    sharding = array.sharding
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def run_divided(params: Any, jitted: Any, model: nn.Module, *arrays: Any, **static: Any) -> Any:
    """The results of `jitted(model, params, *arrays, **static)` on the devices that have `params`.

    `params` are what `place_params` returns. Every process gives `arrays` whole; the mesh axis data
    divides their rows. The results are numpy arrays, perhaps with more rows at their ends.
    """
    devices = strategy_of(params)
    divided = devices.divide(arrays, axes=("data",))
    run = compile_piece(devices, model, params, jitted, *divided, **static)
    return devices.gather(run(*divided))
