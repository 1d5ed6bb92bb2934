"""Losses that depend on several rows at once, such as contrastive ones, on any division of a batch.

A loss sees the rows of one device. One that is no sum over rows needs the rows of all devices:
`gather_rows` gives them. `check_loss` finds a loss that would compute another function without.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Int, Shaped

from jaxformer.errors import ConfigError
from jaxformer.nn.axes import example_inputs
from jaxformer.ops.partitioning import device_axes
from jaxformer.training.losses import Loss
from jaxformer.training.train_step import Batch, loss_sums

ROWS = "rows"
"""A `jax.vmap` with this `axis_name` counts as devices: it simulates them on one."""


def gather_rows(x: Shaped[Array, "B ..."]) -> Shaped[Array, "R ..."]:
    """The rows of `x` of all devices that share a batch, in the order of `row_numbers`.

    Under `jax.jit` alone an array has all rows, and is returned as it is. Under a strategy's step,
    `jax.shard_map` and `jax.pmap` each device has its own: they are gathered over the axes along
    which `x` differs, with `check_vma=False` over all axes. Gradients flow back to each device.

    A loss returns the terms of its own rows, so that their sum over devices counts each once:

    >>> def contrastive_loss(params, batch, rng):  # row i of `x` belongs to row i of `y`
    ...     x, y = batch["x"] @ params, jf.gather_rows(batch["y"] @ params)
    ...     labels = jf.row_numbers(x)
    ...     nats = optax.softmax_cross_entropy_with_integer_labels(x @ y.T, labels)
    ...     return nats.sum(), jnp.float32(len(x))
    >>> batch = {"x": jnp.eye(3), "y": jnp.eye(3)}
    >>> nats, rows = contrastive_loss(jnp.zeros((3, 2)), batch, None)
    >>> round(float(nats / rows), 3)  # log 3
    1.099
    """
    axes = _row_axes(x)
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def row_numbers(x: Shaped[Array, "B ..."]) -> Int[Array, " B"]:
    """The numbers of the rows of `x` among the rows that `gather_rows(x)` returns.

    >>> jf.row_numbers(jnp.ones((3, 2))).tolist()  # on one device
    [0, 1, 2]
    """
    axes, numbers = _row_axes(x), jnp.arange(len(x))
    return numbers + jax.lax.axis_index(axes) * len(x) if axes else numbers


def check_loss(loss: Loss, model: nn.Module, batch: Batch, *, params: Any = None) -> bool:
    """Whether `loss` is a sum over rows, so that a batch may also be cut into parts.

    False for a loss that sees the rows of all devices by `gather_rows`. Raises `ConfigError` for
    one that mixes the rows of a device alone: on several devices it is another function. The mean
    of four rows of `batch` is compared with the mean of two halves, and where these differ, with
    the mean on two simulated devices. Nothing is dropped. `params` default to random ones.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.arange(24).reshape(4, 6) % 11
    >>> jf.check_loss(jf.causal_loss(model), model, jf.StreamBatch.create(tokens, vocab_size=11))
    True
    """
    if params is None:
        inputs = tuple(jnp.zeros(x.shape, x.dtype) for x in example_inputs(model))
        params = nn.unbox(jax.jit(model.init)(jax.random.key(0), *inputs)["params"])
    four = jax.tree.map(_four_rows, batch)
    halves = jax.tree.map(_halves, four)
    in_axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, four)

    def sums(params: Any, rows: Batch) -> Array:
        total, (count, _) = loss_sums(loss, params, rows, None)
        return jnp.stack([jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)])

    def on_devices(params: Any) -> Array:
        of_device = jax.vmap(partial(sums, params), (in_axes,), axis_name=ROWS)
        return of_device(halves).sum(axis=0)

    def in_halves(params: Any) -> Array:
        first, second = (jax.tree.map(partial(_half, number), halves) for number in range(2))
        return sums(params, first) + sums(params, second)

    with jax.default_matmul_precision("highest"):
        whole = _mean(jax.jit(sums)(params, four))
        if _is_close(_mean(jax.jit(in_halves)(params)), whole, model):
            return True
        mean_of_devices = _mean(jax.jit(on_devices)(params))
    if _is_close(mean_of_devices, whole, model):
        return False
    raise ConfigError(
        f"the loss of four rows is {whole:.6g} on one device, but {mean_of_devices:.6g} on two "
        "devices with two rows each: it is no sum over rows, and each device sees its rows alone. "
        "Take the rows of all devices by jf.gather_rows(x), or train on one device with "
        "grad_accumulation=1"
    )


def _four_rows(leaf: Any) -> np.ndarray:
    """The first four rows of a leaf of a batch, from the start again where it has fewer."""
    leaf = np.asarray(leaf)
    return leaf[np.arange(4) % len(leaf)] if leaf.ndim else leaf


def _halves(leaf: np.ndarray) -> np.ndarray:
    """Two halves [2, 2, ...] of the four rows of a leaf."""
    return leaf.reshape(2, 2, *leaf.shape[1:]) if leaf.ndim else leaf


def _half(number: int, leaf: np.ndarray) -> np.ndarray:
    return leaf[number] if leaf.ndim else leaf


def _mean(sums: Array) -> float:
    total, count = np.asarray(sums).tolist()
    return total / max(count, 1.0)


def _is_close(mean: float, expected: float, model: nn.Module) -> bool:
    """Whether two means differ by rounding alone."""
    dtype = jnp.dtype(getattr(getattr(model, "config", None), "dtype", jnp.float32))
    tolerance = 1e-5 if dtype.itemsize >= 4 else 1e-2
    return abs(mean - expected) <= tolerance * max(1.0, abs(expected))


def _row_axes(x: Array) -> tuple[Any, ...]:
    """The axes along which devices have other rows of `x`."""
    axes = device_axes(x)
    try:
        jax.lax.axis_size(ROWS)
    except NameError:  # no vmap simulates devices
        return axes
    return (*axes, ROWS)
