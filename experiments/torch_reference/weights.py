"""Copies weights between jaxformer's models and the PyTorch reference `Transformer` and `GPT`."""

from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.torch_reference.weight_map import (
    Entry,
    bias_of_heads,
    into_heads,
    linear,
    norm,
    out,
    same,
    to_jax,
    to_torch,
)
from jaxformer.config import TransformerConfig


def entries_of(config: TransformerConfig) -> list[Entry]:
    """Returns the weight map of the reference `Transformer` or, without encoder, of `GPT`."""
    if config.num_encoder_layers == 0:
        return _gpt_entries(config)
    entries = [Entry("embedding.weight", ("embedding/table",), same())]
    stacks = (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
    for stack, layers in stacks:
        cross = stack == "decoder"
        for number in range(layers):
            names = f"{stack}.layers.{number}", f"{stack}/blocks_{number}"
            entries += _layer(*names, config, cross=cross)
        if config.norm.placement == "pre":
            names = f"{stack}.final_norm", f"{stack}/final_norm"
            entries += norm(*names, bias=config.use_bias)
    return entries


def _gpt_entries(config: TransformerConfig) -> list[Entry]:
    entries = [
        Entry("embedding.weight", ("embedding/table",), same()),
        Entry("positions.weight", ("decoder/positions/table",), same()),
        *norm("final_norm", "decoder/final_norm", bias=config.use_bias),
    ]
    heads, bias = config.num_heads, config.use_bias
    for number in range(config.num_decoder_layers):
        prefix, scope = f"blocks.{number}", f"decoder/blocks_{number}"
        joint = f"{prefix}.attention.query_key_value"
        for kind, leaf, transform in (
            ("weight", "kernel", into_heads(heads, parts=3)),
            ("bias", "bias", bias_of_heads(heads, parts=3)),
        ):
            paths = tuple(f"{scope}/attention/{part}/{leaf}" for part in ("query", "key", "value"))
            entries += (
                [Entry(f"{joint}.{kind}", paths, transform)] if bias or kind == "weight" else []
            )
        entries += out(f"{prefix}.attention.out", f"{scope}/attention/out", heads, bias=bias)
        for part in ("up", "down"):
            names = f"{prefix}.feed_forward.{part}", f"{scope}/feed_forward/{part}"
            entries += linear(*names, bias=bias)
        for part in ("attention_norm", "feed_forward_norm"):
            entries += norm(f"{prefix}.{part}", f"{scope}/{part}", bias=bias)
    return entries


def load_params(params: Any, model: nn.Module, config: TransformerConfig) -> None:
    """Copies our `params` into the reference `model`, in place."""
    state = to_torch(params, entries_of(config))
    # The model changes its tensors in place, so it gets copies.
    model.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})


def params_of(model: nn.Module, config: TransformerConfig) -> dict[str, Any]:
    """Returns the weights of the reference `model` as our tree of numpy arrays."""
    return to_jax(_numpy(model.state_dict()), entries_of(config))


def gradients_of(model: nn.Module, config: TransformerConfig) -> dict[str, Any]:
    """Returns the gradients of the reference `model` as our tree of numpy arrays."""
    return to_jax(
        _numpy({n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
        entries_of(config),
    )


def _numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def _layer(prefix: str, scope: str, config: TransformerConfig, *, cross: bool) -> list[Entry]:
    bias = config.use_bias
    entries = []
    for name in ("attention", "cross_attention") if cross else ("attention",):
        entries += _attention(f"{prefix}.{name}", f"{scope}/{name}", config)
        entries += norm(f"{prefix}.{name}_residual.norm", f"{scope}/{name}_norm", bias=bias)
    for part in ("up", "down"):
        names = f"{prefix}.feed_forward.{part}", f"{scope}/feed_forward/{part}"
        entries += linear(*names, bias=bias)
    names = f"{prefix}.feed_forward_residual.norm", f"{scope}/feed_forward_norm"
    return entries + norm(*names, bias=bias)


def _attention(prefix: str, scope: str, config: TransformerConfig) -> list[Entry]:
    heads, entries = config.num_heads, []
    for name in ("query", "key", "value"):
        entries.append(
            Entry(f"{prefix}.{name}.weight", (f"{scope}/{name}/kernel",), into_heads(heads))
        )
        if config.use_bias:
            bias = bias_of_heads(heads)
            entries.append(Entry(f"{prefix}.{name}.bias", (f"{scope}/{name}/bias",), bias))
    return entries + out(f"{prefix}.out", f"{scope}/out", heads, bias=config.use_bias)
