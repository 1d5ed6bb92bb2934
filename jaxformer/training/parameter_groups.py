"""Parameters by path: which are frozen, and how the learning rate falls from layer to layer."""

import re
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.nn.stacking import STACKED, is_stacked
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params, flatten, map_with_path, matrix_mask, path_name

_BLOCK = re.compile(rf"(?:^|/)(?:blocks_(\d+)|{STACKED})/")


def freeze_gradient(loss: Loss, pattern: str) -> Loss:
    """`loss` without the gradient by the parameters that `freeze` keeps as they are."""

    def stop(path: Any, leaf: Any) -> Any:
        return jax.lax.stop_gradient(leaf) if re.search(pattern, path_name(path)) else leaf

    def is_boxed(leaf: Any) -> bool:  # a box has the path of its parameter
        return isinstance(leaf, nn.meta.AxisMetadata)

    def trained(params, batch, rng):
        params = jax.tree_util.tree_map_with_path(stop, params, is_leaf=is_boxed)
        return loss(params, batch, rng)

    return trained


def freeze(optimizer: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """`optimizer` for the parameters in whose path the regular expression `pattern` is not found.

    The others keep their bits and have no state. With stacked blocks (`scan_layers`) a path stands
    for all layers. `init` raises `ConfigError` for a pattern that finds no or every parameter, and
    for one that separates biases from their kernels: rules for matrices could not tell them apart.
    """

    def label(params: Params) -> Params:
        return map_with_path(
            lambda path, _: "frozen" if re.search(pattern, path) else "trained", params
        )

    def init(params: Params) -> optax.OptState:
        _check_pattern(params, pattern)
        return inner.init(params)

    rules: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    inner = optax.partition(rules, label)
    return optax.GradientTransformationExtraArgs(init, inner.update)


def scale_layers(decay: float) -> optax.GradientTransformation:
    """Multiplies updates by `decay` once for each layer between a parameter and the output.

    Clark et al. 2020 (ELECTRA). In a stack of L blocks the last is multiplied by `decay`, the first
    by decay^L, and embeddings and positions by decay^(L + 1), with the L of the deepest stack. What
    follows the blocks, such as norms and heads, is not changed.
    """

    def scale(updates: Params, params: Params | None = None) -> Params:
        depths = _depths(updates)

        def scaled(path: str, leaf: jax.Array) -> jax.Array:
            return leaf * _layer_scale(path, leaf, decay, depths).astype(leaf.dtype)

        return map_with_path(scaled, updates)

    return optax.stateless(scale)


def _depths(tree: Params) -> dict[str, int]:
    """The number of blocks of each stack, by the path of the stack."""
    depths: dict[str, int] = {}
    for path, leaf in flatten(tree).items():
        if found := _BLOCK.search(path):
            count = len(leaf) if is_stacked(path) else int(found[1]) + 1
            stack = path[: found.start()]
            depths[stack] = max(depths.get(stack, 0), count)
    return depths


def _layer_scale(path: str, leaf: jax.Array, decay: float, depths: dict[str, int]) -> jax.Array:
    """What the updates of a parameter are multiplied by; one number a layer for stacked blocks."""
    found = _BLOCK.search(path)
    if found is None:
        before = any("embedding" in x or "position" in x for x in path.split("/")[:-1])
        return jnp.asarray(decay ** (max(depths.values(), default=0) + 1) if before else 1.0)
    depth = depths[path[: found.start()]]
    if not is_stacked(path):
        return jnp.asarray(decay ** (depth - int(found[1])))
    scales = decay ** (depth - jnp.arange(depth, dtype=jnp.float32))
    return scales.reshape(-1, *[1] * (leaf.ndim - 1))


def _check_pattern(params: Params, pattern: str) -> None:
    """Raises `ConfigError` for a pattern that `freeze` cannot follow."""
    paths = flatten(params)
    frozen = {path for path in paths if re.search(pattern, path)}
    if not frozen or len(frozen) == len(paths):
        raise ConfigError(
            f"freeze={pattern!r} is found in {'every' if frozen else 'no'} path of a parameter, "
            f"such as {', '.join(sorted(paths)[:3])}: give another regular expression"
        )
    trained = {path: leaf for path, leaf in paths.items() if path not in frozen}
    whole = flatten(matrix_mask(params))
    for path, is_matrix in matrix_mask(trained).items():
        if is_matrix != whole[path]:
            raise ConfigError(
                f"freeze={pattern!r} keeps a kernel but trains its bias {path}, which weight decay "
                "and update rules would take for a matrix: freeze both or none of them"
            )
