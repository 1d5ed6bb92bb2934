"""Weights of torch's own attention and Transformer layers, as ours and back; numpy in and out.

`multihead_attention`, `encoder_layer`, `decoder_layer` and `transformer` are the tables of
`torch.nn.MultiheadAttention`, `TransformerEncoderLayer`, `TransformerDecoderLayer` and
`Transformer`; with `tables.to_ours` and `tables.to_theirs` they carry a state dict:

    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    params = to_ours(state, multihead_attention(state, num_heads))

Nothing here depends on `batch_first`, which is about activations: our order is [B, T, D].
"""

import re

import jax
from flax import linen as nn

from experiments.pytorch_twin.tables import (
    Row,
    State,
    bias_of_heads,
    into_heads,
    linear,
    norm,
    out,
)
from jaxformer.blocks import Stack
from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.layers import Norm
from jaxformer.masks import Mask

_PARTS = ("query", "key", "value")


class Transformer(nn.Module):
    """`torch.nn.Transformer` of our parts: between vectors, and with a norm after each stack.

    torch norms the end of post-norm stacks once more; the paper, and `EncoderDecoder`, do not.
    `config.positions` is "none" for an equal function.
    """

    config: TransformerConfig

    def setup(self):
        config = self.config
        self.encoder = Stack(config, config.num_encoder_layers)
        self.decoder = Stack(config, config.num_decoder_layers, cross=True)
        if config.norm_placement == "post":
            self.encoder_norm = Norm(config)
            self.decoder_norm = Norm(config)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: Mask,
        target_mask: Mask,
        memory_mask: Mask,
    ) -> jax.Array:
        """[B, T, D] for `target` [B, T, D], given `source` [B, S, D]."""
        post = self.config.norm_placement == "post"
        memory, _ = self.encoder(source, source_mask)
        memory = self.encoder_norm(memory) if post else memory
        memory = self.decoder.memory_keys_values(memory)
        x, _ = self.decoder(target, target_mask, memory=memory, memory_mask=memory_mask)
        return self.decoder_norm(x) if post else x


def multihead_attention(
    state: State, num_heads: int, *, theirs: str = "", ours: str = ""
) -> list[Row]:
    """The rows of the `torch.nn.MultiheadAttention` whose weights in `state` begin with `theirs`.

    They make the parameters of `jaxformer.MultiHeadAttention` under the path `ours`. Keys and
    values may be of another size than queries (`kdim` = `vdim`), as long as they are of one.
    Raises `ConfigError` where they are not, and for the extra key of `add_bias_kv`.
    """
    _check_attention(state, theirs)
    paths = [f"{ours}{part}/kernel" for part in _PARTS]
    rows = []
    if f"{theirs}in_proj_weight" in state:
        rows.append(Row(f"{theirs}in_proj_weight", tuple(paths), into_heads(num_heads, parts=3)))
    else:
        for letter, path in zip("qkv", paths, strict=True):
            rows.append(Row(f"{theirs}{letter}_proj_weight", (path,), into_heads(num_heads)))
    bias = f"{theirs}in_proj_bias" in state
    if bias:
        paths = [f"{ours}{part}/bias" for part in _PARTS]
        rows.append(Row(f"{theirs}in_proj_bias", tuple(paths), bias_of_heads(num_heads, parts=3)))
    return rows + out(f"{theirs}out_proj", f"{ours}out", num_heads, bias=bias)


def encoder_layer(state: State, num_heads: int, *, theirs: str = "", ours: str = "") -> list[Row]:
    """The rows of a `torch.nn.TransformerEncoderLayer`, as the parameters of a `Block`."""
    norms = {"attention": "norm1", "feed_forward": "norm2"}
    return _layer(state, num_heads, {"attention": "self_attn"}, norms, theirs=theirs, ours=ours)


def decoder_layer(state: State, num_heads: int, *, theirs: str = "", ours: str = "") -> list[Row]:
    """The rows of a `torch.nn.TransformerDecoderLayer`, as those of a `Block` with `cross`."""
    names = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    norms = {"attention": "norm1", "cross_attention": "norm2", "feed_forward": "norm3"}
    return _layer(state, num_heads, names, norms, theirs=theirs, ours=ours)


def transformer(state: State, num_heads: int, *, norm_first: bool) -> list[Row]:
    """The rows of a `torch.nn.Transformer`, as the parameters of a `Transformer` of this module.

    `norm_first` is the one that it was made with, of which a state dict says nothing.
    """
    rows, text = [], "\n".join(state)
    for stack, layer in (("encoder", encoder_layer), ("decoder", decoder_layer)):
        for i in sorted({int(n) for n in re.findall(rf"^{stack}\.layers\.(\d+)\.", text, re.M)}):
            names = {"theirs": f"{stack}.layers.{i}.", "ours": f"{stack}/blocks_{i}/"}
            rows += layer(state, num_heads, **names)
        ours = f"{stack}/final_norm" if norm_first else f"{stack}_norm"
        rows += norm(f"{stack}.norm", ours, bias=f"{stack}.norm.bias" in state)
    return rows


def _layer(
    state: State,
    num_heads: int,
    attentions: dict[str, str],
    norms: dict[str, str],
    *,
    theirs: str,
    ours: str,
) -> list[Row]:
    rows = []
    for name, module in attentions.items():
        names = {"theirs": f"{theirs}{module}.", "ours": f"{ours}{name}/"}
        rows += multihead_attention(state, num_heads, **names)
    for name, module in norms.items():
        bias = f"{theirs}{module}.bias" in state
        rows += norm(f"{theirs}{module}", f"{ours}{name}_norm", bias=bias)
    for name, module in (("up", "linear1"), ("down", "linear2")):
        bias = f"{theirs}{module}.bias" in state
        rows += linear(f"{theirs}{module}", f"{ours}feed_forward/{name}", bias=bias)
    return rows


def _check_attention(state: State, theirs: str) -> None:
    if f"{theirs}bias_k" in state:
        raise ConfigError(
            f"{theirs}bias_k adds a key that belongs to no token, which our attention does not "
            "have: give a module made without add_bias_kv"
        )
    apart = [f"{theirs}{letter}_proj_weight" for letter in "kv"]
    sizes = [state[name].shape[-1] for name in apart if name in state]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"kdim={sizes[0]} and vdim={sizes[1]}, but our keys and values are both made of one "
            "memory: give a module in which they are equal"
        )
