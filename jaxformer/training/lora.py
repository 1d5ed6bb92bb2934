"""Low-rank adapters (LoRA, Hu et al. 2022): a few trained parameters beside frozen matrices.

An adapter of the matrix W is a subtree beside it, named like it with `_lora`: `a` [in, r], `b`
[r, out] and `scale`, with leading axes of stacked layers and of experts. `merge_adapters` replaces
W by W + scale * a b, which are the parameters of the same model without adapters. A module of such
a name that is no adapter of a matrix stays. The base has no gradient and no optimizer state, so any
model, loss, optimizer and strategy can be used:

    axes = parameter_axes(model)
    params = add_adapters(
        params, rng, rank=8, alpha=16.0, targets="attention/.*/kernel$", axes=axes
    )
    step = make_train_step(adapter_loss(loss, axes=axes), freeze(optimizer, FROZEN))

Given `axes`, `adapter_loss` lets each dense layer multiply with W and with a and b, one after the
other: neither a second W nor its gradient is in memory. Without them, and in other modules, W is
replaced by the sum in each part of a batch.
"""

import math
import re
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.errors import ConfigError
from jaxformer.nn.axes import Axes
from jaxformer.nn.dense import Dense
from jaxformer.ops.dense import AdaptedMatrix
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import (
    ADAPTER_SUFFIX,
    ModelAxes,
    Params,
    axes_of,
    flatten,
    freeze_gradient,
)

ADAPTER = f"{ADAPTER_SUFFIX}/[ab]$"
"""Matches the paths of the trained parameters of an adapter."""

FROZEN = f"^(?!.*{ADAPTER})"
"""Matches the paths of all other parameters (see `freeze`)."""


def add_adapters(
    params: Params,
    rng: jax.Array,
    *,
    rank: int,
    alpha: float,
    targets: str,
    axes: ModelAxes | None = None,
) -> Params:
    """`params` with an adapter of each matrix whose path matches the regular expression `targets`.

    `a` is random and `b` is zero, so that nothing changes before the first step; the scale is
    `alpha` / `rank`. `axes` come from `parameter_axes`; without them a matrix has two
    dimensions. Raises `ConfigError` where `targets` matches no matrix.

    >>> params = {"up": {"kernel": jnp.ones((5, 7)), "bias": jnp.ones(7)}}
    >>> adapted = add_adapters(params, jax.random.key(0), rank=2, alpha=4.0, targets="up/")
    >>> {name: leaf.shape for name, leaf in adapted["up"]["kernel_lora"].items()}
    {'a': (5, 2), 'b': (2, 7), 'scale': ()}
    >>> sorted(merge_adapters(adapted)["up"])
    ['bias', 'kernel']
    """
    leaves = flatten(params)
    axes_by_path = {path: axes_of(path, leaf, axes) for path, leaf in leaves.items()}
    matrices = {path: parameter for path, parameter in axes_by_path.items() if parameter.inputs}
    chosen = [path for path in matrices if re.search(targets, path)]
    if not chosen:
        raise ConfigError(
            f"lora_targets={targets!r} matches no path of a matrix, such as "
            f"{', '.join(sorted(matrices)[:3])}: give another regular expression"
        )
    keys = jax.vmap(partial(jax.random.fold_in, rng))(jnp.arange(len(chosen)))
    alike = defaultdict[Any, list[int]](list)
    for number, path in enumerate(chosen):
        leaf = leaves[path]
        alike[leaf.shape, leaf.dtype, matrices[path].matrix_shape(leaf.shape)].append(number)
    for numbers in alike.values():
        first = chosen[numbers[0]]
        draw = partial(_draw_inputs, matrices[first], leaves[first], rank)
        # One program draws matrices of one shape: one for each takes ten times as long to compile.
        for number, a in zip(numbers, jax.vmap(draw)(keys[np.array(numbers)]), strict=True):
            path = chosen[number]
            adapter = _new_adapter(matrices[path], leaves[path], a, alpha)
            leaves |= dict(zip(_adapter_paths(path), adapter, strict=True))
    return unflatten_dict(leaves, sep="/")


def merge_adapters(params: Params) -> Params:
    """`params` without adapters, each matrix with the product of its adapter added.

    >>> adapter = {"a": jnp.ones((5, 2)), "b": jnp.ones((2, 7)), "scale": jnp.float32(0.5)}
    >>> merged = merge_adapters({"kernel": jnp.zeros((5, 7)), "kernel_lora": adapter})
    >>> float(merged["kernel"][0, 0])
    1.0
    """
    merged, adapters = _split(_flatten(params))
    for path, adapter in adapters.items():
        merged[path] = _merged(merged[path], adapter)
    return unflatten_dict(merged, sep="/")


class Adapter(NamedTuple):
    """The parameters of the adapter of a matrix, in the order of `_adapter_paths`."""

    a: Any
    b: Any
    scale: Any


def adapters_of(params: Params) -> dict[str, Adapter]:
    """The adapters in `params`, by the paths of their matrices."""
    return _split(_flatten(params))[1]


def attach_adapters(params: Params, axes: ModelAxes) -> Params:
    """`params` without adapters, in which each kernel of a `Dense` is an `AdaptedMatrix`.

    The model computes with them as with the merged ones. `axes` come from `parameter_axes`. The
    adapters of other modules' matrices, such as tables and experts, are merged.

    >>> model, ids = jf.DecoderOnly(jf.GPT2), jnp.ones((1, 3), int)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    >>> axes = jf.parameter_axes(model)
    >>> options = {"rank": 2, "alpha": 4.0, "targets": "feed_forward/", "axes": axes}
    >>> adapt = lambda params, rng: attach_adapters(add_adapters(params, rng, **options), axes)
    >>> params = jax.eval_shape(adapt, params, jax.random.key(0))
    >>> kernel = params["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"]
    >>> kernel.matrix.shape, kernel.a.shape, kernel.b.shape
    ((768, 3072), (768, 2), (2, 3072))
    """
    attached, adapters = _split(_flatten(params))
    for path, adapter in adapters.items():
        if path in axes and axes[path].module is Dense:
            attached[path] = AdaptedMatrix(attached[path], *adapter)
        else:
            attached[path] = _merged(attached[path], adapter)
    return unflatten_dict(attached, sep="/")


def adapter_loss(loss: Loss, frozen: str = FROZEN, axes: ModelAxes | None = None) -> Loss:
    """`loss` of adapted parameters; parameters whose path matches `frozen` get no gradient.

    With `axes` of the model it gets the result of `attach_adapters`, which takes the memory of one
    copy of the matrices; without them, as for a loss that reads parameters otherwise than by the
    modules of its model, the merged parameters.

    >>> model = jf.DecoderOnly(jf.GPT2)
    >>> loss = adapter_loss(jf.causal_loss(model), axes=jf.parameter_axes(model))
    """

    def loss_of_adapted(params: Params, batch: Any, rng: jax.Array | None) -> Any:
        adapted = merge_adapters(params) if axes is None else attach_adapters(params, axes)
        return loss(adapted, batch, rng)

    return freeze_gradient(loss_of_adapted, frozen)


def replace_base(params: Params, base: Params) -> Params:
    """`base`, which has no adapters, with the adapters of `params`."""
    leaves = _flatten(params)
    adapters = leaves.keys() - _split(leaves)[0].keys()
    return unflatten_dict(_flatten(base) | {path: leaves[path] for path in adapters}, sep="/")


def without_adapters(params: Params) -> Params:
    """The base: `params` without adapters, which are not merged."""
    return unflatten_dict(_split(_flatten(params))[0], sep="/")


def _flatten(params: Params) -> dict[str, Any]:
    """The leaves by path, where a box of Flax is a leaf."""
    return flatten_dict(params, sep="/")


def _adapter_paths(path: str) -> list[str]:
    """The paths of the parameters of an adapter of the matrix at `path`."""
    return [f"{path}{ADAPTER_SUFFIX}/{name}" for name in Adapter._fields]


def _split(leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Adapter]]:
    """The leaves by path that belong to no adapter, and the adapters by the paths of matrices."""
    base, adapters = dict(leaves), {}
    for path in leaves:
        paths = _adapter_paths(path)
        if all(x in leaves for x in paths):
            adapters[path] = Adapter(*(base.pop(x) for x in paths))
    return base, adapters


def _draw_inputs(axes: Axes, leaf: Any, rank: int, rng: jax.Array) -> jax.Array:
    """The matrix `a` of the adapter of `leaf` before the first step."""
    inputs, _ = axes.matrix_shape(leaf.shape)
    shape = *leaf.shape[: axes.num_stacked], inputs, rank
    limit = 1.0 / math.sqrt(inputs)
    return jax.random.uniform(rng, shape, leaf.dtype, -limit, limit)


def _new_adapter(axes: Axes, leaf: Any, a: jax.Array, alpha: float) -> Adapter:
    """The adapter of a matrix before the first step, with its drawn `a`."""
    _, outputs = axes.matrix_shape(leaf.shape)
    stack = leaf.shape[: axes.num_stacked]
    rank = a.shape[-1]
    return Adapter(
        a=a,
        b=jnp.zeros((*stack, rank, outputs), leaf.dtype),
        scale=jnp.full(stack, alpha / rank, leaf.dtype),
    )


def _merged(matrix: Any, adapter: Adapter) -> Any:
    """A matrix with the product of its adapter added; loaded parameters stay in numpy."""
    matrix, (a, b, scale) = nn.unbox((matrix, adapter))
    if isinstance(matrix, np.ndarray):
        product = np.matmul(a, b)
    else:
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return matrix + (scale[..., None, None] * product).reshape(matrix.shape).astype(matrix.dtype)
