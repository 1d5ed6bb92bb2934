"""Parameters by path: which are matrices, and which are frozen."""

import re
from collections.abc import Callable, Hashable, Mapping
from itertools import starmap
from typing import Any

import jax
import optax
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.nn.axes import INPUT, OUTPUT, Axes
from jaxformer.training.losses import Loss

Params = Any
"""Nested dicts of arrays: what a Flax module's `init` returns under "params"."""

ModelAxes = Mapping[str, Axes]
"""{"path/of/leaf": its axes}, as `parameter_axes` returns them."""

ADAPTER_SUFFIX = "_lora"
"""An adapter of the matrix at "path/of/leaf" is the subtree "path/of/leaf_lora" (see `lora`)."""


def path_name(path: tuple[Any, ...]) -> str:
    """The keys of a path of `jax.tree_util` as "path/of/leaf"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree (parameters, a state, a batch) as {"path/of/leaf": leaf}.

    In the order of JAX; `flax.traverse_util.flatten_dict` takes nested dicts only.
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """The tree of `function(path, leaf)` for each leaf of `tree`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [(path_name(path), leaf) for path, leaf in leaves]
    return jax.tree.unflatten(structure, starmap(function, named))


def axes_of(path: str, leaf: Any, axes: ModelAxes | None) -> Axes:
    """The axes of the leaf at `path`.

    A leaf that `axes` does not have is a matrix [inputs, outputs] if it has two dimensions, and a
    vector if it has fewer. Raises `ConfigError` for one with more.
    """
    axes = axes or {}
    if path in axes:
        return axes[path]
    parent, _, name = path.rpartition("/")
    if parent.endswith(ADAPTER_SUFFIX) and parent.removesuffix(ADAPTER_SUFFIX) in axes:
        adapted = axes[parent.removesuffix(ADAPTER_SUFFIX)]
        inputs, outputs = ((), ()) if name == "scale" else ((INPUT,), (OUTPUT,))
        return adapted._replace(inputs=inputs, outputs=outputs)
    if leaf.ndim > 2:
        raise ConfigError(
            f"{path} has the shape {list(leaf.shape)}, but which of its axes are inputs is not "
            "known: give axes=jf.parameter_axes(model, *inputs)"
        )
    return Axes((INPUT,), (OUTPUT,)) if leaf.ndim == 2 else Axes((), (OUTPUT,) * leaf.ndim)


def freeze_gradient(loss: Loss, pattern: str) -> Loss:
    """`loss` without the gradient by the parameters that `freeze` leaves unchanged."""

    def stop(path: Any, leaf: Any) -> Any:
        return jax.lax.stop_gradient(leaf) if re.search(pattern, path_name(path)) else leaf

    def is_boxed(leaf: Any) -> bool:  # a box has the path of its parameter
        return isinstance(leaf, nn.meta.AxisMetadata)

    def trained(params, batch, rng):
        params = jax.tree_util.tree_map_with_path(stop, params, is_leaf=is_boxed)
        return loss(params, batch, rng)

    return trained


def freeze(optimizer: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """`optimizer` for the parameters whose path the regular expression `pattern` does not match.

    The others do not change and have no state. With stacked blocks (`scan_layers`) a path stands
    for all layers. `init` raises `ConfigError` for a pattern that matches no or every parameter.
    """

    def label(params: Params) -> Params:
        return map_with_path(
            lambda path, _: "frozen" if re.search(pattern, path) else "trained", params
        )

    def init(params: Params) -> optax.OptState:
        paths = sorted(flatten(params))
        frozen = [path for path in paths if re.search(pattern, path)]
        if len(frozen) in (0, len(paths)):
            raise ConfigError(
                f"freeze={pattern!r} matches {'every' if frozen else 'no'} path of a parameter, "
                f"such as {', '.join(paths[:3])}: give another regular expression"
            )
        return inner.init(params)

    rules: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    inner = optax.partition(rules, label)
    return optax.GradientTransformationExtraArgs(init, inner.update)
