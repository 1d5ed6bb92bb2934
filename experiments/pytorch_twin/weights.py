"""The table between our parameters and the twin's: both directions of carrying weights."""

from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.pytorch_twin.tables import (
    Row,
    bias_of_heads,
    into_heads,
    linear,
    norm,
    out,
    same,
    to_ours,
    to_theirs,
)
from jaxformer.config import TransformerConfig


def table(config: TransformerConfig) -> list[Row]:
    """The rows of `experiments.pytorch_twin.transformer.Transformer` of `config`."""
    rows = [Row("embedding.weight", ("embedding/table",), same())]
    stacks = (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
    for stack, layers in stacks:
        cross = stack == "decoder"
        for number in range(layers):
            names = f"{stack}.layers.{number}", f"{stack}/blocks_{number}"
            rows += _layer(*names, config, cross=cross)
        if config.norm_placement == "pre":
            names = f"{stack}.final_norm", f"{stack}/final_norm"
            rows += norm(*names, bias=config.use_bias)
    return rows


def give(params: Any, model: nn.Module, config: TransformerConfig) -> None:
    """Puts our `params` into the twin `model`, in place."""
    state = to_theirs(params, table(config))
    # Copies: the model will write into them.
    model.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})


def take(model: nn.Module, config: TransformerConfig) -> dict[str, Any]:
    """The weights of the twin `model` as our tree, in numpy."""
    return to_ours(_numpy(model.state_dict()), table(config))


def take_gradients(model: nn.Module, config: TransformerConfig) -> dict[str, Any]:
    """The gradients that the last `backward` left in the twin, as our tree."""
    return to_ours(_numpy({n: p.grad for n, p in model.named_parameters()}), table(config))


def _numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def _layer(theirs: str, ours: str, config: TransformerConfig, *, cross: bool) -> list[Row]:
    bias = config.use_bias
    rows = []
    for name in ("attention", "cross_attention") if cross else ("attention",):
        rows += _attention(f"{theirs}.{name}", f"{ours}/{name}", config)
        rows += norm(f"{theirs}.{name}_residual.norm", f"{ours}/{name}_norm", bias=bias)
    for part in ("up", "down"):
        names = f"{theirs}.feed_forward.{part}", f"{ours}/feed_forward/{part}"
        rows += linear(*names, bias=bias)
    names = f"{theirs}.feed_forward_residual.norm", f"{ours}/feed_forward_norm"
    return rows + norm(*names, bias=bias)


def _attention(theirs: str, ours: str, config: TransformerConfig) -> list[Row]:
    heads, rows = config.num_heads, []
    for name in ("query", "key", "value"):
        rows.append(Row(f"{theirs}.{name}.weight", (f"{ours}/{name}/kernel",), into_heads(heads)))
        if config.use_bias:
            bias = bias_of_heads(heads)
            rows.append(Row(f"{theirs}.{name}.bias", (f"{ours}/{name}/bias",), bias))
    return rows + out(f"{theirs}.out", f"{ours}/out", heads, bias=config.use_bias)
