"""A model whose weights are 8-bit integers: a quarter of the memory, faster steps on a CPU."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import Axes, axes_in, trace_modules
from jaxformer.nn.layers import Embedding, LMHead
from jaxformer.nn.models import DecodingModel
from jaxformer.ops.dense import (
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
    has its own scale. Norms, biases, learned positions and matrices of other modules do not change.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[1, 5, 7]])
    >>> init = lambda: quantize(model, model.init(jax.random.key(0), tokens)["params"])
    >>> table = jax.eval_shape(init)["embedding"]["table"]
    >>> table.values.shape, table.values.dtype, table.scale.shape  # 11 rows, each with a scale
    ((11, 8), dtype('int8'), (11,))
    """
    _check_model(model)
    trace = trace_modules(model)
    axes = axes_in(trace)
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    for path, leaf in leaves.items():
        parent, _, name = path.rpartition("/")
        if parent in trace.modules and path in axes:
            leaves[path] = _quantized(trace.modules[parent], name, leaf, axes[path])
    return unflatten_dict(leaves, sep="/")


@dataclass(frozen=True)
class Int8:
    """`model` with the parameters of `quantize`, for decoding.

    It takes the place of the model in `translate` and `complete`. Each product with weights also
    rounds the rows of activations to 8 bits, with a scale for each row. Its sums are exact
    (vector-wise quantization, Dettmers et al. 2022, section 3). Attention, norms and sums stay in
    `config.dtype`. Raises `ConfigError` for a model that does not decode.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> in_8_bits = Int8(jf.DecoderOnly(config))  # jf.Loaded(in_8_bits, quantized, tokenizer)
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


def _quantized(module: nn.Module, name: str, leaf: jax.Array, axes: Axes) -> Any:
    """The parameter `name` of `module` in 8 bits, or as it is where the module needs it so."""

    def of_layer(leaf: jax.Array) -> QuantizedMatrix:
        # XLA on a CPU is faster where the inputs of each output are next to each other.
        return quantize_matrix(leaf.reshape(math.prod(leaf.shape[: len(axes.inputs)]), -1).T, 1)

    if name == "table" and isinstance(module, Embedding):
        return quantize_matrix(leaf, 1)
    if name == "kernel" and isinstance(module, LMHead):
        # Not transposed: Flax checks that what `LMHead` declares has its shape.
        return quantize_matrix(leaf, 0)
    if name == "kernel" and _is_dense(module):
        return jax.vmap(of_layer)(leaf) if axes.layers else of_layer(leaf)
    return leaf


def _intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Calls a method, or computes its result from the quantized matrices of its module."""
    module = context.module
    if context.method_name == "lookup" and isinstance(module, Embedding):
        table: Any = module.table
        return take_rows(table, *args)
    if context.method_name == "__call__" and _is_dense(module):
        if is_quantized(module.get_variable("params", "kernel")):
            return _dense(module, *args)
    return call(*args, **kwargs)


def _is_dense(module: nn.Module) -> bool:
    """Whether `module` multiplies the last axes of its input with a kernel."""
    if isinstance(module, nn.DenseGeneral):
        axis = _input_axes(module)
        return not module.batch_dims and axis == tuple(range(-len(axis), 0))
    return isinstance(module, nn.Dense)


def _input_axes(module: nn.Dense | nn.DenseGeneral) -> tuple[int, ...]:
    axis = getattr(module, "axis", -1)
    return axis if isinstance(axis, tuple) else (axis,)


def _dense(module: Any, x: jax.Array) -> jax.Array:
    matrix = module.get_variable("params", "kernel")
    out = int8_matmul(x.reshape(-1, matrix.values.shape[matrix.inputs]), matrix)
    if module.has_variable("params", "bias"):
        out = out + module.get_variable("params", "bias").reshape(1, -1)
    features = module.features if isinstance(module.features, tuple) else (module.features,)
    kept = x.shape[: x.ndim - len(_input_axes(module))]
    return out.reshape(*kept, *features).astype(module.dtype)
