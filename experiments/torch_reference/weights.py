"""Weights as jaxformer's parameters and as torch's state dicts, in both directions by one map.

A weight map (`jaxformer.pretrained.weight_map`) has torch's name and jaxformer's paths of each
array; `weight_map_of` makes it for the reference `Transformer` and `GPT`. All arrays are
numpy's: a state dict is {name: array}.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxformer.config import TransformerConfig
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.torch_layers import joined_biases, joined_kernels, to_jax, to_torch
from jaxformer.pretrained.weight_map import Entry


def weight_map_of(config: TransformerConfig) -> list[Entry]:
    """The weight map of the reference `Transformer` or, without encoder, of `GPT`."""
    bias = config.use_bias
    entries = [maps.entry("embedding/table", "embedding.weight")]
    if config.num_encoder_layers == 0:
        entries.append(maps.entry("decoder/positions/table", "positions.weight"))
        entries += maps.norm("decoder/final_norm", "final_norm", bias=bias)
        for number in range(config.num_decoder_layers):
            entries += _gpt_block(f"decoder/blocks_{number}", f"blocks.{number}", bias)
        return entries
    stacks = (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
    for stack, layers in stacks:
        for number in range(layers):
            scope, prefix = f"{stack}/blocks_{number}", f"{stack}.layers.{number}"
            attentions = ["attention"]
            if stack == "decoder":
                attentions.append("cross_attention")
            for name in attentions:
                parts = {part: part for part in ("query", "key", "value", "out")}
                entries += maps.layers(f"{scope}/{name}", f"{prefix}.{name}", parts, bias=bias)
                entries += maps.norm(
                    f"{scope}/{name}_norm", f"{prefix}.{name}_residual.norm", bias=bias
                )
            entries += _feed_forward(scope, prefix, bias)
            residual = f"{prefix}.feed_forward_residual.norm"
            entries += maps.norm(f"{scope}/feed_forward_norm", residual, bias=bias)
        if config.norm.placement == "pre":
            entries += maps.norm(f"{stack}/final_norm", f"{stack}.final_norm", bias=bias)
    return entries


def load_params(params: Any, model: Any, config: TransformerConfig) -> None:
    """Copies our `params` into the reference `model`, in place."""
    import torch

    state = to_torch(params, weight_map_of(config))
    # The model changes its tensors in place, so it gets copies.
    model.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})


def params_of(model: Any, config: TransformerConfig) -> dict[str, Any]:
    """The weights of the reference `model` as our tree of numpy arrays."""
    return _to_jax(model.state_dict(), config)


def gradients_of(model: Any, config: TransformerConfig) -> dict[str, Any]:
    """The gradients of the reference `model` as our tree of numpy arrays."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _to_jax(gradients, config)


@functools.lru_cache(maxsize=4)
def shapes_of(config: TransformerConfig) -> dict[str, Any]:
    """The shapes of our parameters of the reference `Transformer` or, without encoder, of `GPT`."""
    model: Any = EncoderDecoder(config) if config.num_encoder_layers else DecoderOnly(config)
    tokens = [np.zeros((1, 2), np.int32)] * (2 if config.num_encoder_layers else 1)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *tokens))["params"]


def _to_jax(tensors: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    state = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
    return to_jax(state, weight_map_of(config), shapes_of(config))


def _gpt_block(scope: str, prefix: str, bias: bool) -> list[Entry]:
    attention, name = f"{scope}/attention", f"{prefix}.attention.query_key_value"
    paths = [f"{attention}/{part}" for part in ("query", "key", "value")]
    entries = [joined_kernels(paths, f"{name}.weight")]
    if bias:
        entries.append(joined_biases(paths, f"{name}.bias"))
    out = maps.linear(inputs=2)
    entries += maps.dense(f"{attention}/out", f"{prefix}.attention.out", bias=bias, kernel=out)
    for part in ("attention_norm", "feed_forward_norm"):
        entries += maps.norm(f"{scope}/{part}", f"{prefix}.{part}", bias=bias)
    return entries + _feed_forward(scope, prefix, bias)


def _feed_forward(scope: str, prefix: str, bias: bool) -> list[Entry]:
    entries = []
    for part in ("up", "down"):
        name = f"feed_forward.{part}"
        entries += maps.dense(f"{scope}/feed_forward/{part}", f"{prefix}.{name}", bias=bias)
    return entries
