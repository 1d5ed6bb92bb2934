"""Models as modules of Flax NNX: with their weights, their dropout, their cache; and back.

The Linen model stays what computes. The NNX module holds its parameters as `nnx.Param`, under the
paths that they have in Linen: `model.decoder["blocks_0"]["attention"]["query"]["kernel"]`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.errors import ConfigError
from jaxformer.nn.axes import example_inputs
from jaxformer.ops.attention import reference


class ModelWithParams(Protocol):
    """A model and its parameters, such as `Loaded`."""

    model: Any
    params: Any


class NNXModel(nnx.bridge.ToNNX):
    """A Linen model as an NNX module, as `to_nnx` returns it.

    It is called as the model is, and has its methods: `model(tokens)`,
    `model.decode_step(tokens, cache)`. After `model.train()`, which is the first state, each call
    draws dropout anew from the stream "dropout" of its `nnx.Rngs`, or from their default stream;
    without `nnx.Rngs`, and after `model.eval()`, nothing is dropped. A method that takes no
    `dropout_rng`, such as `decode_step`, never drops. A `dropout_rng` that is given counts.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.to_nnx(jf.DecoderOnly(config), rngs=nnx.Rngs(0))
    >>> model.eval()
    >>> model.deterministic, type(model.linen).__name__
    (True, 'DecoderOnly')
    """

    def __init__(self, model: nn.Module, variables: Any, rngs: nnx.Rngs | None = None) -> None:
        super().__init__(model, rngs)
        self.to_nnx__deterministic = False  # the bridge takes other attributes for variables
        for name, tree in _as_attributes(variables).items():
            setattr(self, name, nnx.data(tree))

    @property
    def linen(self) -> nn.Module:
        """The Linen model."""
        return self.to_nnx__module

    @property
    def deterministic(self) -> bool:
        """Whether nothing is dropped; `train()` and `eval()` set it."""
        return self.to_nnx__deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        self.to_nnx__deterministic = value

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets `deterministic`, unless it is None; `nnx.view` calls it on a copy."""
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(
        self,
        *args: Any,
        rngs: nnx.Rngs | Mapping[str, Any] | jax.Array | None = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The result of the model, or of a `method` of it.

        `rngs` take the place of those that the module has.
        """
        given = self.to_nnx__rngs if rngs is None else _as_rngs(rngs)
        drops = not self.deterministic and self._takes_dropout(method)
        streams = nnx.Rngs(**_draw(given, drops))
        return super().__call__(*args, rngs=streams, method=method, mutable=mutable, **kwargs)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Linen model's `apply`, by which losses and training steps call a model.

        Parameters may also be an NNX model, or the `nnx.State` of one.
        """
        return self.linen.apply(
            {**variables, "params": _pure(variables["params"])}, *args, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        linen = vars(self).get("to_nnx__module")
        of_linen = hasattr(nn.Module, name) or name in getattr(linen, "__dataclass_fields__", {})
        if of_linen and not name.startswith("_"):
            raise AttributeError(
                f"an NNX model has no {name!r}, which is Linen's: call linen, params = "
                "jf.from_nnx(model), and use linen"
            )
        return super().__getattr__(name)

    def _takes_dropout(self, method: Callable[..., Any] | str | None) -> bool:
        """Whether `method` takes a `dropout_rng`; True for a model that does not know the word."""
        kind = type(self.linen)
        if "dropout_rng" not in inspect.signature(kind.__call__).parameters:
            return True
        if method is None:
            return True
        function = getattr(kind, method) if isinstance(method, str) else method
        return "dropout_rng" in inspect.signature(function).parameters


def to_nnx(
    model: nn.Module | ModelWithParams,
    params: Any = None,
    *,
    rngs: nnx.Rngs | None = None,
    inputs: tuple[Any, ...] = (),
) -> NNXModel:
    """A Linen model, or a `Loaded` one, as an NNX module.

    Without `params` it gets random ones from `rngs`; `inputs` are then arrays that the model takes,
    by default one token. `rngs` also give the stream of dropout (see `NNXModel`). Raises
    `ConfigError` for a model without parameters and `rngs`, and for one that is no Linen module.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.to_nnx(jf.DecoderOnly(config), rngs=nnx.Rngs(0, dropout=1))
    >>> model(jnp.array([[1, 5, 7]])).shape
    (1, 3, 11)
    >>> model.embedding["table"].shape
    (11, 8)
    """
    if not isinstance(model, nn.Module | nnx.Module) and hasattr(model, "params"):
        if params is not None:
            raise ConfigError(
                f"params were given with a {type(model).__name__}, which has its own: leave them "
                "out, or give its model with them"
            )
        model, params = model.model, model.params
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is no Linen module, so it does not become one of NNX: give "
            "a model such as DecoderOnly, with its parameters or in a Loaded"
        )
    if params is not None:
        return NNXModel(model, {"params": jax.tree.map(jnp.asarray, params)}, rngs)
    if rngs is None:
        raise ConfigError(
            "neither params nor rngs were given: give params, or rngs=nnx.Rngs(seed), from which "
            "random ones are made"
        )
    linen = model
    if hasattr(model, "attention_fn"):  # it has no parameters, and may not support the call
        linen = model.clone(attention_fn=reference)
    arrays = inputs or tuple(jnp.zeros(x.shape, x.dtype) for x in example_inputs(model))
    streams = {name: stream() for name, stream in rngs.items()}
    if "params" not in streams:
        streams["params"] = rngs.params()
    return NNXModel(model, nn.unbox(linen.init(streams, *arrays)), rngs)


def from_nnx(model: NNXModel) -> tuple[nn.Module, Any]:
    """The Linen model of an NNX one, and its parameters in nested dicts.

    All other functions take these. `nnx.update(model, params)` puts parameters back. Raises
    `ConfigError` for anything but what `to_nnx` returns.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.to_nnx(jf.DecoderOnly(config), rngs=nnx.Rngs(0))
    >>> linen, params = jf.from_nnx(model)
    >>> linen.apply({"params": params}, jnp.array([[1, 5, 7]])).shape
    (1, 3, 11)
    """
    if not isinstance(model, NNXModel):
        raise ConfigError(
            f"a {type(model).__name__} is not what to_nnx returns: give a model that it has made"
        )
    return model.linen, _pure(model)


def _pure(params: Any) -> Any:
    """`params` in nested dicts; they may be an NNX model or its state."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params


def _as_rngs(rngs: nnx.Rngs | Mapping[str, Any] | jax.Array) -> nnx.Rngs:
    if isinstance(rngs, nnx.Rngs):
        return rngs
    return nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)


def _draw(rngs: nnx.Rngs | None, drops: bool) -> dict[str, jax.Array]:
    """The next key of each stream, and one for dropout if the model `drops`.

    A model that does not drop leaves the streams of parameters and of dropout as they are: it can
    be called in a compiled function that did not get it as an argument.
    """
    if rngs is None:
        return {}
    if drops:
        keys = {name: stream() for name, stream in rngs.items()}
        if "dropout" not in keys and "default" in keys:
            keys["dropout"] = rngs.dropout()
        return keys
    streams = {name for name, _ in rngs.items()} - {"params", "default", "dropout"}
    return {name: rngs[name]() for name in sorted(streams)}


def _as_attributes(variables: Any) -> dict[str, Any]:
    """The variables of all collections as nested dicts of `nnx.Variable`."""
    leaves: dict[tuple[str, ...], nnx.Variable[Any]] = {}
    for collection, tree in variables.items():
        kind = nnx.variable_type_from_name(collection, allow_register=True)
        leaves |= {path: kind(leaf) for path, leaf in flatten_dict(tree).items()}
    return unflatten_dict(leaves)
