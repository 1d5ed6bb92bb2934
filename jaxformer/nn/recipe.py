"""The parts of a recipe as modules: only models and stacks know `TransformerConfig`."""

import math
from collections.abc import Callable
from functools import partial

from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.nn.blocks import Block
from jaxformer.nn.dense import Initializer
from jaxformer.nn.embeddings import Embedding
from jaxformer.nn.stack import NORMAL, Stack
from jaxformer.ops.attention import AttentionFn, check_attention_fn, reference


def initializers(config: TransformerConfig) -> tuple[Initializer, Initializer]:
    """The initializers of matrices, and of tables with a row for each id or bucket."""
    if config.initializer == "xavier":
        return nn.initializers.xavier_uniform(), nn.initializers.normal(config.d_model**-0.5)
    return NORMAL, NORMAL


def residual_initializer(config: TransformerConfig) -> Initializer:
    """The initializer of projections into the residual (Radford et al. 2019, section 2.3)."""
    if config.initializer != "scaled_normal":
        kernel_init, _ = initializers(config)
        return kernel_init
    blocks = config.num_encoder_layers + config.num_decoder_layers
    return nn.initializers.normal(0.02 / math.sqrt(2 * blocks))


def make_embedding(
    config: TransformerConfig, vocab_size: int, zero_id: int | None = None
) -> Embedding:
    """A table of `vocab_size` vectors of the model of `config`."""
    _, table_init = initializers(config)
    return Embedding(
        vocab_size,
        config.d_model,
        scale=config.embeddings.scale,
        zero_id=zero_id,
        table_init=table_init,
        dtype=config.dtype,
    )


def make_stack(
    config: TransformerConfig,
    num_layers: int,
    cross: bool = False,
    attention_fn: AttentionFn = reference,
    block: Callable[..., nn.Module] = Block,
) -> Stack:
    """The stack of `config`.

    `block` makes each block from the fields of `Block`: `Block`, one of `REMAT`, or your own.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2)
    >>> stack, x = make_stack(config, num_layers=2), jnp.ones((3, 5, 8))
    >>> variables = jax.eval_shape(stack.init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['blocks_0', 'blocks_1']
    """
    check_attention_fn(attention_fn)
    kernel_init, table_init = initializers(config)
    make_block = partial(
        block,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        cross=cross,
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        dropout_rate=config.dropout_rate,
        norm_options=config.norm,
        attention_options=config.attention,
        feed_forward_options=config.feed_forward,
        use_bias=config.use_bias,
        attention_fn=attention_fn,
        kernel_init=kernel_init,
        out_init=residual_initializer(config),
        dtype=config.dtype,
    )
    return Stack(
        num_layers,
        make_block,
        scheme=config.positions,
        max_len=config.max_len,
        table_init=table_init,
        dropout_rate=config.dropout_rate,
        window=config.window,
        norm_options=config.norm,
        use_bias=config.use_bias,
        input_norm=config.embeddings.norm,
        output_norm=config.norm.placement != "post",
        scan=config.scan_layers,
    )
