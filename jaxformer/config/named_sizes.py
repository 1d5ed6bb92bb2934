"""The named sizes of the papers."""

from jaxformer.config.parts import (
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
)
from jaxformer.config.positions import Learned, Rotary
from jaxformer.config.transformer import TransformerConfig

TRANSFORMER_BASE = TransformerConfig(
    vocab_size=37_000,
    d_model=512,
    d_ff=2048,
    num_heads=8,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.1,
)
"""Vaswani et al. 2017, Table 3 "base": 63,082,496 parameters (the paper prints 65 million)."""

TRANSFORMER_BIG = TransformerConfig(
    vocab_size=37_000,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dropout_rate=0.3,
)
"""Vaswani et al. 2017, Table 3 "big": 214,245,376 parameters (the paper prints 213 million)."""

GPT2 = TransformerConfig(
    vocab_size=50_257,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    num_decoder_layers=12,
    max_len=1024,
    dropout_rate=0.1,
    positions=Learned(),
    norm=NormOptions(placement="pre", eps=1e-5),
    attention=AttentionOptions(dropout_rate=0.1),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    initializer="scaled_normal",
)
"""Radford et al. 2019, the smallest model: 124,439,808 parameters."""

BERT_BASE = TransformerConfig(
    vocab_size=30_522,
    d_model=768,
    d_ff=3072,
    num_heads=12,
    num_encoder_layers=12,
    dropout_rate=0.1,
    positions=Learned(),
    norm=NormOptions(eps=1e-12),
    attention=AttentionOptions(dropout_rate=0.1),
    feed_forward=FeedForwardOptions("gelu"),
    embeddings=EmbeddingOptions(tied="output", scale=False, norm=True, num_types=2),
    pooler="tanh",
    initializer="normal",
)
"""Devlin et al. 2019, the base model: 109,482,240 parameters with its pooler."""

LLAMA3_8B = TransformerConfig(
    vocab_size=128_256,
    d_model=4096,
    d_ff=14_336,
    num_heads=32,
    num_decoder_layers=32,
    max_len=8192,
    positions=Rotary(base=500_000.0),
    norm=NormOptions("rms", placement="pre", eps=1e-5),
    attention=AttentionOptions(num_kv_heads=8),
    feed_forward=FeedForwardOptions("silu", gated=True),
    embeddings=EmbeddingOptions(tied="none", scale=False),
    use_bias=False,
    initializer="normal",
    scan_layers=True,
    dtype="bfloat16",
)
"""Llama Team 2024, Table 3, the model of 8 billion: 8,030,261,248 parameters."""
