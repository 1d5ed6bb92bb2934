"""Weight maps of torch's attention and Transformer layers.

`multihead_attention`, `encoder_layer`, `decoder_layer` and `transformer` are the maps of
`torch.nn.MultiheadAttention`, `TransformerEncoderLayer`, `TransformerDecoderLayer` and
`Transformer`; with `weights.to_jax` and `weights.to_torch` they carry a state dict:

    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    like = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
    params = to_jax(state, multihead_attention(state), like)

Nothing here depends on `batch_first`, which is about activations: our order is [B, T, D].
"""

import re

import jax
from flax import linen as nn

from experiments.torch_reference.weights import State, joined
from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block, MakeBlock
from jaxformer.nn.layers import Norm
from jaxformer.nn.stack import make_stack
from jaxformer.ops.masks import AttentionMask
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.weight_map import Entry


class Transformer(nn.Module):
    """`torch.nn.Transformer` made of our modules: vectors in and out, a norm after each stack.

    torch applies a final norm also with post-norm; the paper and `EncoderDecoder` do not.
    `config.positions` must be `NoPositions()` to give the same function.
    """

    config: TransformerConfig
    block: MakeBlock = Block

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
        """Returns [B, T, D] for `target` [B, T, D] and `source` [B, S, D]."""
        post = self.config.norm.placement == "post"
        memory = self.encoder(source, source_mask)
        memory = self.encoder_norm(memory) if post else memory
        encoder_kv = self.decoder.encoder_keys_values(memory)
        x = self.decoder(target, target_mask, encoder_kv=encoder_kv, encoder_mask=encoder_mask)
        return self.decoder_norm(x) if post else x


def multihead_attention(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of the `MultiheadAttention` under `prefix` in `state`.

    They make the parameters of `jaxformer.MultiHeadAttention` under the path `scope`. Keys and
    values may be of another size than queries (`kdim` = `vdim`), as long as they are of one.
    Raises `ConfigError` where they are not, and for the extra key of `add_bias_kv`.
    """
    _check_attention(state, prefix)
    bias, weight = f"{prefix}in_proj_bias", f"{prefix}in_proj_weight"
    bias = bias if bias in state else ""
    paths = [f"{scope}{part}" for part in ("query", "key", "value")]
    entries = joined(paths, weight, bias)
    if weight not in state:
        entries[:1] = [
            maps.entry(f"{path}/kernel", f"{prefix}{letter}_proj_weight", maps.linear())
            for path, letter in zip(paths, "qkv", strict=True)
        ]
    out = maps.linear(inputs=2)
    return entries + maps.dense(f"{scope}out", f"{prefix}out_proj", bool(bias), kernel=out)


def encoder_layer(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of a `TransformerEncoderLayer`, as the parameters of a `Block`."""
    norms = {"attention": "norm1", "feed_forward": "norm2"}
    return _layer(state, {"attention": "self_attn"}, norms, prefix=prefix, scope=scope)


def decoder_layer(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of a `TransformerDecoderLayer`, as a `Block` with `cross`."""
    names = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    norms = {"attention": "norm1", "cross_attention": "norm2", "feed_forward": "norm3"}
    return _layer(state, names, norms, prefix=prefix, scope=scope)


def transformer(
    state: State, *, norm_first: bool, prefix: str = "", scope: str = ""
) -> list[Entry]:
    """The entries of the `torch.nn.Transformer` under `prefix`, as the `Transformer` above.

    `norm_first` is the argument of torch's module; a state dict does not hold it.
    """
    entries, text = [], "\n".join(state)
    for stack, layer in (("encoder", encoder_layer), ("decoder", decoder_layer)):
        theirs, ours = f"{prefix}{stack}", f"{scope}{stack}"
        numbers = re.findall(rf"^{re.escape(theirs)}\.layers\.(\d+)\.", text, re.M)
        for i in sorted({int(n) for n in numbers}):
            entries += layer(state, prefix=f"{theirs}.layers.{i}.", scope=f"{ours}/blocks_{i}/")
        norm = f"{ours}/final_norm" if norm_first else f"{ours}_norm"
        entries += maps.norm(norm, f"{theirs}.norm", f"{theirs}.norm.bias" in state)
    return entries


def _layer(
    state: State, attentions: dict[str, str], norms: dict[str, str], *, prefix: str, scope: str
) -> list[Entry]:
    entries = []
    for name, module in attentions.items():
        names = {"prefix": f"{prefix}{module}.", "scope": f"{scope}{name}/"}
        entries += multihead_attention(state, **names)
    for name, module in norms.items():
        bias = f"{prefix}{module}.bias" in state
        entries += maps.norm(f"{scope}{name}_norm", f"{prefix}{module}", bias)
    for name, module in (("up", "linear1"), ("down", "linear2")):
        bias = f"{prefix}{module}.bias" in state
        entries += maps.dense(f"{scope}feed_forward/{name}", f"{prefix}{module}", bias)
    return entries


def _check_attention(state: State, prefix: str) -> None:
    if f"{prefix}bias_k" in state:
        raise ConfigError(
            f"{prefix}bias_k adds a key that belongs to no token, which our attention does not "
            "have: give a module made without add_bias_kv"
        )
    apart = [f"{prefix}{letter}_proj_weight" for letter in "kv"]
    sizes = [state[name].shape[-1] for name in apart if name in state]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"kdim={sizes[0]} and vdim={sizes[1]}, but our keys and values are both made of one "
            "memory: give a module in which they are equal"
        )
