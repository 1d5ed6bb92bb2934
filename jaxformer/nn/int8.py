"""A model whose weights are 8-bit integers: a quarter of the memory, faster steps on a CPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.layers import Embedding, LMHead
from jaxformer.nn.models import DecodingModel, EncoderDecoder
from jaxformer.nn.stacking import STACKED
from jaxformer.ops.activations import softcap
from jaxformer.ops.int8 import (
    QuantizedMatrix,
    int8_matmul,
    is_quantized,
    quantize_matrix,
    take_rows,
)


def quantize(model: DecodingModel, params: Any) -> Any:
    """`params` with the weights of dense layers, embeddings and the LM head as 8-bit integers.

    The result is for `Int8(model)`. The type of a module decides whether its weights are quantized,
    so this also works for your own block. Each output of a dense layer and each row of an embedding
    has its own scale. Norms, biases and learned positions do not change.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[1, 5, 7]])
    >>> init = lambda: quantize(model, model.init(jax.random.key(0), tokens)["params"])
    >>> table = jax.eval_shape(init)["embedding"]["table"]
    >>> table.values.shape, table.values.dtype, table.scale.shape  # 11 rows, each with a scale
    ((11, 8), dtype('int8'), (11,))
    """
    leaves: dict[tuple[str, ...], Any] = flatten_dict(params)
    rules = _rules(model, params)
    for path in rules.keys() & leaves.keys():
        rule = rules[path]
        leaves[path] = (jax.vmap(rule) if STACKED in path else rule)(leaves[path])
    return unflatten_dict(leaves)


@dataclass(frozen=True)
class Int8:
    """`model` with the parameters of `quantize`, for decoding.

    It takes the place of the model in `translate` and `complete`. Each product with weights also
    rounds the rows of activations to 8 bits, with a scale for each row. Its sums are exact
    (vector-wise quantization, Dettmers et al. 2022, section 3). Attention, norms and sums stay in
    `config.dtype`. Raises `ConfigError` for a model that does not decode.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[1, 5, 7]])
    >>> params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    >>> exact = jax.jit(model.apply)({"params": params}, tokens)
    >>> quantized = jax.jit(lambda params: quantize(model, params))(params)
    >>> rounded = jax.jit(Int8(model).apply)({"params": quantized}, tokens)
    >>> bool(jnp.abs(rounded - exact).max() < 0.1)
    True
    """

    model: DecodingModel

    def __post_init__(self) -> None:
        _check_model(self.model)

    @property
    def config(self) -> TransformerConfig:
        """The config of the model."""
        return self.model.config

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`model.apply` in 8 bits. Raises `ConfigError` for parameters not from `quantize`."""
        if not any(map(is_quantized, jax.tree.leaves(variables, is_leaf=is_quantized))):
            raise ConfigError(
                "an Int8 model was given parameters that are not quantized: give quantize(model, "
                "params)"
            )
        with nn.intercept_methods(_intercept):
            return self.model.apply(variables, *args, **kwargs)


def _check_model(model: Any) -> None:
    if not isinstance(model, DecodingModel):
        raise ConfigError(
            f"8 bits are for models that decode, but a {type(model).__name__} was given: give an "
            "EncoderDecoder or a DecoderOnly"
        )


def _rules(model: DecodingModel, params: Any) -> dict[tuple[str, ...], Callable[[jax.Array], Any]]:
    """How to quantize the parameters at these paths, by the modules that a call of `model` uses."""
    _check_model(model)
    rules: dict[tuple[str, ...], Callable[[jax.Array], Any]] = {}

    def record(call, args, kwargs, context):
        module = context.module
        if _is_dense(context):
            rules[*module.path, "kernel"] = lambda leaf: _quantize_kernel(leaf, _input_axes(module))
        elif isinstance(module, Embedding):
            rules[*module.path, "table"] = lambda leaf: quantize_matrix(leaf, 1)
        elif isinstance(module, LMHead):
            # Not transposed: Flax checks that what `LMHead` declares has its shape.
            rules[*module.path, "kernel"] = lambda leaf: quantize_matrix(leaf, 0)
        return call(*args, **kwargs)

    ids = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * (1 + isinstance(model, EncoderDecoder))
    with nn.intercept_methods(record):
        jax.eval_shape(lambda params, *ids: model.apply({"params": params}, *ids), params, *ids)
    return rules


def _quantize_kernel(kernel: jax.Array, input_axes: int) -> QuantizedMatrix:
    # XLA on a CPU is faster where the inputs of each output are next to each other.
    return quantize_matrix(kernel.reshape(math.prod(kernel.shape[:input_axes]), -1).T, 1)


def _intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Calls a method, or computes its result from the quantized matrices of its module."""
    module = context.module
    if context.method_name == "lookup" and isinstance(module, Embedding):
        table: Any = module.table
        return take_rows(table, *args)
    if context.method_name == "__call__" and isinstance(module, LMHead):
        return _lm_head(module, *args, **kwargs)
    if _is_dense(context) and is_quantized(module.get_variable("params", "kernel")):
        return _dense(module, *args)
    return call(*args, **kwargs)


def _is_dense(context: nn.module.InterceptorContext) -> bool:
    module = context.module
    if context.method_name != "__call__" or not isinstance(module, nn.Dense | nn.DenseGeneral):
        return False
    # Those that act on other than the last axes stay as they are.
    axes = getattr(module, "axis", -1)
    last = axes == -1 or axes == tuple(range(-_input_axes(module), 0))
    return last and not getattr(module, "batch_dims", ())


def _input_axes(module: nn.Dense | nn.DenseGeneral) -> int:
    axis = getattr(module, "axis", -1)
    return len(axis) if isinstance(axis, tuple) else 1


def _lm_head(head: LMHead, hidden: jax.Array, embedding: Embedding | None = None) -> jax.Array:
    matrix: Any = head.get_variable("params", "kernel") if embedding is None else embedding.table
    logits = int8_matmul(hidden.reshape(-1, hidden.shape[-1]), matrix)
    if head.use_bias:
        logits = logits + head.get_variable("params", "bias")[None]
    return softcap(logits.reshape(*hidden.shape[:-1], -1), head.softcap)


def _dense(module: Any, x: jax.Array) -> jax.Array:
    matrix = module.get_variable("params", "kernel")
    out = int8_matmul(x.reshape(-1, matrix.values.shape[matrix.inputs]), matrix)
    if module.use_bias:
        out = out + module.get_variable("params", "bias").reshape(1, -1)
    features = module.features if isinstance(module.features, tuple) else (module.features,)
    return out.reshape(*x.shape[: x.ndim - _input_axes(module)], *features).astype(module.dtype)
