"""`torch.nn.Transformer` made of our modules, and its weight map.

`jaxformer.pretrained.torch_layers` has the maps of its layers.
"""

import re
from collections.abc import Callable

import jax
from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.nn.blocks import Block
from jaxformer.nn.norm import Norm
from jaxformer.nn.recipe import make_stack
from jaxformer.ops.masks import AttentionMask
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.torch_layers import State, decoder_layer, encoder_layer
from jaxformer.pretrained.weight_map import Entry


class Transformer(nn.Module):
    """`torch.nn.Transformer` made of our modules: vectors in and out, a norm after each stack.

    torch applies a final norm also with post-norm; the paper and `EncoderDecoder` do not.
    `config.positions` must be `NoPositions()` to give the same function.
    """

    config: TransformerConfig
    block: Callable[..., nn.Module] = Block

    def setup(self):
        config, block = self.config, self.block
        self.encoder = make_stack(config, config.num_encoder_layers, block=block)
        self.decoder = make_stack(config, config.num_decoder_layers, cross=True, block=block)
        if config.norm.placement == "post":
            norm = config.norm.kind, config.norm.eps, config.use_bias
            self.encoder_norm, self.decoder_norm = Norm(*norm), Norm(*norm)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: AttentionMask,
        target_mask: AttentionMask,
        encoder_mask: AttentionMask,
    ) -> jax.Array:
        """The output [B, T, D] for `target` [B, T, D] and `source` [B, S, D]."""
        post = self.config.norm.placement == "post"
        memory = self.encoder(source, source_mask)
        memory = self.encoder_norm(memory) if post else memory
        encoder_kv = self.decoder.encoder_keys_values(memory)
        x = self.decoder(target, target_mask, encoder_kv=encoder_kv, encoder_mask=encoder_mask)
        return self.decoder_norm(x) if post else x


def transformer(
    state: State, *, norm_first: bool, prefix: str = "", scope: str = ""
) -> list[Entry]:
    """The entries of the `torch.nn.Transformer` under `prefix`, as the `Transformer` above.

    `norm_first` is the argument of torch's module; a state dict does not hold it.
    """
    entries = []
    text = "\n".join(state)
    for stack, layer in (("encoder", encoder_layer), ("decoder", decoder_layer)):
        theirs, ours = f"{prefix}{stack}", f"{scope}{stack}"
        numbers = re.findall(rf"^{re.escape(theirs)}\.layers\.(\d+)\.", text, re.M)
        for i in sorted({int(n) for n in numbers}):
            entries += layer(state, prefix=f"{theirs}.layers.{i}.", scope=f"{ours}/blocks_{i}/")
        norm = f"{ours}/final_norm" if norm_first else f"{ours}_norm"
        has_bias = f"{theirs}.norm.bias" in state
        entries += maps.norm(norm, f"{theirs}.norm", bias=has_bias)
    return entries
