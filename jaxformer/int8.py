"""Weights in 8 bits: a quarter of the memory, and faster products where decoding is slow."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.layers import Embedding, Output
from jaxformer.models import DecoderOnly, EncoderDecoder

_MOST = 127


@struct.dataclass
class Quantized:
    """The matrix `values` times `scale`: int8 with the inputs on axis `inputs`, a number an output.

    `values` [O, I] or [I, O], `scale` [O] float32; each output's largest value is 127 or -127.
    """

    values: jax.Array
    scale: jax.Array
    inputs: int = struct.field(pytree_node=False)


def quantize(params: Any) -> Any:
    """`params` with the kernels and the embeddings' tables `Quantized`, for `Int8`.

    Each output of a kernel and each row of a table is rounded by itself, to 1/254 of its largest
    number. Norms, biases and learned positions stay as they are.
    """
    return jax.tree_util.tree_map_with_path(_quantized, params)


def _quantized(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | Quantized:
    module, name = ("", *(key.key for key in path))[-2:]
    if name == "table" and module in ("embedding", "source_embedding"):
        return _rounded(leaf, 1)
    if name != "kernel":
        return leaf
    if module == "output":  # Flax checks that what `Output` declares has its shape
        return _rounded(leaf, 0)
    # XLA on a CPU is faster where the inputs of each output stand together.
    size = leaf.shape[0] * (leaf.shape[1] if module == "out" else 1)
    return _rounded(jnp.reshape(leaf, (size, -1)).T, 1)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def _rounded(matrix: jax.Array, inputs: int) -> Quantized:
    values, scale = _in_int8(matrix, inputs)
    return Quantized(values, scale.squeeze(inputs), inputs)


def _in_int8(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 values and, with `axis` of size 1, the scale that makes `x` of them."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis, keepdims=True) / _MOST
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale


@dataclass(frozen=True)
class Int8:
    """`model` to decode with, whose `params` are those of `quantize`.

    It takes the place of the model in `translate` and `complete`. In each product with weights a
    row of numbers is rounded to 8 bits with a scale of its own, and the products are summed
    exactly: what LLM.int8 (Dettmers et al. 2022, section 3) calls vector-wise. Attention, norms
    and what is added stay in `config.dtype`. Raises `ConfigError` for a model without logits.
    """

    model: EncoderDecoder | DecoderOnly

    def __post_init__(self):
        if not isinstance(self.model, EncoderDecoder | DecoderOnly):
            raise ConfigError(
                f"8 bits are for models that decode, but a {type(self.model).__name__} was given: "
                "give an EncoderDecoder or a DecoderOnly"
            )

    @property
    def config(self) -> TransformerConfig:
        """The model's."""
        return self.model.config

    def apply(self, variables: Any, *args: Any, **how: Any) -> Any:
        """`model.apply`, in 8 bits. Raises `ConfigError` for parameters not from `quantize`."""
        if not any(map(_is_quantized, jax.tree.leaves(variables, is_leaf=_is_quantized))):
            raise ConfigError(
                "a model in 8 bits was given parameters that are not: give quantize(params)"
            )
        with nn.intercept_methods(_intercept):
            return self.model.apply(variables, *args, **how)


def _intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """What a method of a module gives, with the modules' `Quantized` in place of their arrays."""
    module = context.module
    if context.method_name == "rows" and isinstance(module, Embedding):
        return _rows(module.table, *args)
    if context.method_name == "readout" and isinstance(module, Output):
        return _readout(module, *args)
    if context.method_name == "__call__" and isinstance(module, nn.Dense | nn.DenseGeneral):
        return _dense(module, *args)
    return call(*args, **kwargs)


def _rows(table: Quantized, ids: jax.Array) -> jax.Array:
    return jnp.take(table.values, ids, axis=0) * jnp.take(table.scale, ids)[..., None]


def _readout(output: Output, x: jax.Array, embedding: Embedding) -> "_Readout":
    matrix = embedding.table if output.config.ties_output else output.kernel
    return _Readout(x, matrix, output.bias if output.config.output_bias else None)


class _Readout(NamedTuple):
    """What of a `losses.Readout` decoding uses."""

    features: jax.Array
    matrix: Quantized
    bias: jax.Array | None

    def logits(self) -> jax.Array:
        found = _product(self.features.reshape(-1, self.features.shape[-1]), self.matrix)
        found = found if self.bias is None else found + self.bias[None]
        return found.reshape(*self.features.shape[:-1], -1).astype(self.features.dtype)


def _dense(module: nn.Dense | nn.DenseGeneral, x: jax.Array) -> jax.Array:
    matrix = module.get_variable("params", "kernel")
    found = _product(x.reshape(-1, matrix.values.shape[matrix.inputs]), matrix)
    if module.use_bias:
        found = found + module.get_variable("params", "bias").reshape(1, -1)
    axis = getattr(module, "axis", -1)
    met = len(axis) if isinstance(axis, tuple) else 1
    outputs = module.features if isinstance(module.features, tuple) else (module.features,)
    return found.reshape(*x.shape[: x.ndim - met], *outputs).astype(module.dtype)


def _product(x: jax.Array, matrix: Quantized) -> jax.Array:
    """`x` [R, I] times `matrix`, [R, O] float32."""
    values, scale = _in_int8(x, 1)
    if len(x) == 1:  # for which XLA on a CPU has a slow loop: it takes 20 times as long as two
        values = jnp.pad(values, ((0, 1), (0, 0)))
    axes = ((1,), (matrix.inputs,)), ((), ())
    sums = jax.lax.dot_general(values, matrix.values, axes, preferred_element_type=jnp.int32)
    return sums[: len(x)].astype(jnp.float32) * scale * matrix.scale[None]
