"""Taps: named values inside a model, read and replaced (activation patching).

The name of a value is the path of its module and a name within it, such as
`decoder/blocks_2/feed_forward/hidden`. A module passes such a value through `tap`. Replacements
reach a model as a collection of variables, that is, as an argument.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import Partial

from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.linen_models import check_linen
from jaxformer.nn.models import EncoderDecoder, Model
from jaxformer.nn.remat import REMAT
from jaxformer.nn.stacked_blocks import STACKED, unstack_blocks
from jaxformer.nn.taps import INTERMEDIATES, REPLACEMENTS
from jaxformer.ops.attention import reference

Replacement = Callable[[jax.Array], Any]
"""A function from a value to what takes its place, of the same shape."""


def tap_names(model: Any, *inputs: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The name and shape of each value that can be read and replaced in a call of `model`.

    Nothing is computed. `inputs` are arrays; they default to one token per text.

    >>> config = jf.TransformerConfig(7, d_model=4, d_ff=5, num_heads=2, num_decoder_layers=1)
    >>> jf.tap_names(jf.DecoderOnly(config))["decoder/blocks_0/feed_forward/hidden"].shape
    (1, 1, 5)
    """
    check_linen(model)
    return _flat(jax.eval_shape(unstack_blocks, _places(model, inputs)))


def read_taps(
    model: Any, params: Any, *inputs: Any, names: Collection[str] | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The result of `model.apply`, and its values by name: all of them, or the given `names`.

    Under `jax.jit` only the values of `names` are kept. A module that is called several times has
    a tuple of values. `options` go to `apply`, such as `method`. Raises `ConfigError` for a
    name that the call does not have.

    >>> config = jf.TransformerConfig(7, d_model=4, d_ff=5, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[3, 5, 6]])
    >>> params = model.init(jax.random.key(0), tokens)["params"]
    >>> name = "decoder/blocks_0/attention/weights"
    >>> logits, values = jf.read_taps(model, params, tokens, names=[name])
    >>> values[name].shape, float(values[name][0, 1, 0, 0])  # the first token sees only itself
    ((1, 2, 3, 3), 1.0)
    """
    check_linen(model)
    result, state = model.apply({"params": params}, *inputs, mutable=[INTERMEDIATES], **options)
    values = _flat(unstack_blocks(state.get(INTERMEDIATES, {})))
    if names is None:
        return result, values
    _check_names(names, values)
    return result, {name: values[name] for name in names}


@dataclass(frozen=True, eq=False)
class Patched:
    """`model`, in which a function replaces each value whose name `replacements` holds.

    It takes the place of the model in `read_taps`, `translate`, `complete` and `score`. The
    functions may use traced arrays, so that `jit`, `vmap` and `grad` see them. To `jax.jit` each
    `Patched` is a model of its own: a program that was compiled with one is never run for another.
    A module that is not from this package needs `inputs`, as `tap_names` does. Raises `ConfigError`
    for a name that the model does not have.

    >>> config = jf.TransformerConfig(7, d_model=4, d_ff=5, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[3, 5, 6]])
    >>> params = model.init(jax.random.key(0), tokens)["params"]
    >>> without = jf.Patched(model, {"decoder/output": jnp.zeros_like})
    >>> bool(jnp.any(without.apply({"params": params}, tokens)))
    False
    """

    model: Any
    replacements: Mapping[str, Replacement]
    inputs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.model, Patched):
            raise ConfigError(
                "a Patched model was given to Patched: give the model itself, and one mapping with "
                "the replacements of both"
            )
        _check_names(self.replacements, tap_names(self.model, *self.inputs))

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`model.apply` with the replacements."""
        return self.model.apply({**variables, REPLACEMENTS: self._variables()}, *args, **kwargs)

    def _variables(self) -> dict[str, Any]:
        """The replacements as a tree; blocks in one loop choose theirs by the layer's number."""
        places: dict[str, Any] = flatten_dict(_places(self.model, self.inputs), sep="/")
        replacements: dict[str, Partial] = {}
        layers: dict[str, dict[int, Replacement]] = defaultdict(dict)
        for name, function in self.replacements.items():
            replace = partial(_replace, name, function)
            if name in places:
                replacements[name] = Partial(replace)
            else:
                before, number, after = re.split(r"blocks_(\d+)", name, maxsplit=1)
                layers[before + STACKED + after][int(number)] = replace
        for name, functions in layers.items():
            numbers = jnp.arange(places[name][0].shape[0])
            replacements[name] = Partial(partial(_replace_in_layers, functions), numbers)
        return unflatten_dict(replacements, sep="/")


def with_attention_weights(model: Any) -> Any:
    """`model` with the attention function that has weights to read and replace, `reference`.

    >>> config = jf.TransformerConfig(7, d_model=4, d_ff=5, num_heads=2, num_decoder_layers=1)
    >>> readable = jf.with_attention_weights(jf.DecoderOnly(config, jf.auto_attention))
    """
    check_linen(model)
    block = Block if model.block in REMAT.values() else model.block
    return model.clone(attention_fn=reference, block=block)


def _replace(name: str, function: Replacement, x: jax.Array) -> jax.Array:
    """`function(x)` in the type of `x`; `ValueError` for another shape."""
    new = jnp.asarray(function(x), x.dtype)
    if new.shape != x.shape:
        raise ValueError(
            f"the replacement of {name} has the shape {new.shape}, but the value has {x.shape}: "
            "return an array of that shape"
        )
    return new


def _replace_in_layers(functions: dict[int, Replacement], number: Any, x: jax.Array) -> jax.Array:
    """`x` of layer `number`, replaced if that layer has a function."""
    for layer, function in functions.items():
        x = jnp.where(number == layer, function(x), x)
    return x


def _places(model: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """The shapes of a call's values as the modules record them."""
    model = getattr(model, "model", model)  # the model inside `Patched`
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    inputs = inputs or (token,) * (1 + isinstance(model, EncoderDecoder))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
    return _traced(model, shapes)


@lru_cache(maxsize=64)
def _traced(model: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> dict[str, Any]:
    if isinstance(model, Model) and model.attention_fn is not reference:
        model = model.clone(attention_fn=_shape_of_attention)

    def init(*inputs: Any) -> Any:
        return model.init(jax.random.key(0), *inputs, mutable=True).get(INTERMEDIATES, {})

    return jax.eval_shape(init, *shapes)


def _shape_of_attention(q: Any, k: Any, v: Any, mask: Any, **_: Any) -> jax.Array:
    """Zeros in the shape of attention, for shapes and devices that a function does not support."""
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)


def _flat(values: Any) -> dict[str, Any]:
    """Values by name. Flax records a tuple of them, one for each call of the module."""
    flat: dict[str, Any] = flatten_dict(values, sep="/")
    return {name: calls[0] if len(calls) == 1 else calls for name, calls in flat.items()}


def _check_names(names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name in known:
            continue
        if name.endswith("/weights") and f"{name.removesuffix('weights')}heads" in known:
            raise ConfigError(
                f"{name} does not exist, because this attention function keeps no weights: give "
                "with_attention_weights(model)"
            )
        near = difflib.get_close_matches(name, known, n=1) or list(known)[:1]
        raise ConfigError(
            f"the model has no value named {name!r}, but one named {near[0]!r}: tap_names(model) "
            "lists all"
        )
