"""Low-rank adapters (LoRA, Hu et al. 2022): a few trained parameters beside frozen matrices.

An adapter of the matrix W is a subtree beside it, named like it with `_lora`: `a` [in, r], `b`
[r, out] and `scale`, with a leading layer axis in stacked blocks. `merge_adapters` replaces W by
W + scale * a b, which are the parameters of the same model without adapters. The base has no
gradient and no optimizer state, so any model, loss, optimizer and strategy can be used:

    params = add_adapters(params, rng, rank=8, alpha=16.0, targets="attention/.*/kernel$")
    step = make_train_step(adapter_loss(loss), freeze(optimizer, FROZEN))

The product a b has the size of W. It is computed once in each part of a batch.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.nn.stacking import is_stacked
from jaxformer.training.losses import Loss
from jaxformer.training.parameter_groups import freeze_gradient
from jaxformer.training.parameters import Params, flatten, matrix_mask, matrix_shape

_SUFFIX = "_lora"

ADAPTER = f"{_SUFFIX}/[ab]$"
"""Found in the paths of what is trained of an adapter."""

FROZEN = f"^(?!.*{ADAPTER})"
"""Found in the paths of all other parameters (see `freeze`)."""


def add_adapters(
    params: Params, rng: jax.Array, *, rank: int, alpha: float, targets: str
) -> Params:
    """`params` with an adapter of each matrix in whose path the regular expression is found.

    `a` is random and `b` is zero, so that nothing changes before the first step; the scale is
    `alpha` / `rank`. Raises `ConfigError` where `targets` finds no matrix.

    >>> params = {"up": {"kernel": jnp.ones((5, 7)), "bias": jnp.ones(7)}}
    >>> adapted = add_adapters(params, jax.random.key(0), rank=2, alpha=4.0, targets="up/")
    >>> {name: leaf.shape for name, leaf in adapted["up"]["kernel_lora"].items()}
    {'a': (5, 2), 'b': (2, 7), 'scale': ()}
    >>> sorted(merge_adapters(adapted)["up"])
    ['bias', 'kernel']
    """
    is_matrix = flatten(matrix_mask(params))
    leaves = flatten(params)
    chosen = [path for path in leaves if is_matrix[path] and re.search(targets, path)]
    if not chosen:
        matrices = ", ".join(sorted(path for path in leaves if is_matrix[path])[:3])
        raise ConfigError(
            f"lora_targets={targets!r} is found in no path of a matrix, such as {matrices}: give "
            "another regular expression"
        )
    adapters: dict[str, Any] = {}
    for number, path in enumerate(chosen):
        key = jax.random.fold_in(rng, number)
        adapters[path] = _adapter(path, leaves[path], key, rank, alpha)
    return _with_adapters(params, adapters)


def merge_adapters(params: Params) -> Params:
    """`params` without adapters, each matrix with the product of its adapter added.

    Parameters without adapters are returned as they are.
    """
    if not isinstance(params, Mapping):
        return params
    found = {}
    for name, leaf in params.items():
        if not name.endswith(_SUFFIX):
            adapter = params.get(name + _SUFFIX)
            found[name] = merge_adapters(leaf) if adapter is None else _merged(leaf, adapter)
    return found


def adapter_loss(loss: Loss, frozen: str = FROZEN) -> Loss:
    """`loss` of the merged parameters, without a gradient by those in whose path `frozen` is."""
    return freeze_gradient(
        lambda params, batch, rng: loss(merge_adapters(params), batch, rng), frozen
    )


def replace_base(params: Params, base: Params) -> Params:
    """`base`, which has no adapters, with the adapters of `params`."""
    if not isinstance(base, Mapping):
        return base
    given = params if isinstance(params, Mapping) else {}
    adapters = {name: leaf for name, leaf in given.items() if name.endswith(_SUFFIX)}
    return {name: replace_base(given.get(name), leaf) for name, leaf in base.items()} | adapters


def without_adapters(params: Params) -> Params:
    """The base: `params` without adapters, and without what these have learned."""
    if not isinstance(params, Mapping):
        return params
    names = (name for name in params if not name.endswith(_SUFFIX))
    return {name: without_adapters(params[name]) for name in names}


def _with_adapters(params: Params, adapters: Mapping[str, Any], parent: str = "") -> Params:
    found = {}
    for name, leaf in params.items():
        path = f"{parent}{name}"
        found[name] = leaf
        if isinstance(leaf, Mapping):
            found[name] = _with_adapters(leaf, adapters, f"{path}/")
        elif path in adapters:
            found[name + _SUFFIX] = adapters[path]
    return found


def _adapter(path: str, leaf: Any, rng: jax.Array, rank: int, alpha: float) -> dict[str, jax.Array]:
    """The adapter of a matrix before the first step."""
    inputs, outputs = matrix_shape(path, leaf)
    layers = leaf.shape[:1] if is_stacked(path) else ()
    limit = 1.0 / math.sqrt(inputs)
    return {
        "a": jax.random.uniform(rng, (*layers, inputs, rank), leaf.dtype, -limit, limit),
        "b": jnp.zeros((*layers, rank, outputs), leaf.dtype),
        "scale": jnp.full(layers, alpha / rank, leaf.dtype),
    }


def _merged(matrix: Any, adapter: Mapping[str, Any]) -> Any:
    """The matrix with the product of its adapter added; loaded parameters stay in numpy."""
    matrix, a, b, scale = nn.unbox((matrix, adapter["a"], adapter["b"], adapter["scale"]))
    if isinstance(matrix, np.ndarray):
        product = np.matmul(a, b)
    else:
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return matrix + (scale[..., None, None] * product).reshape(matrix.shape).astype(matrix.dtype)
