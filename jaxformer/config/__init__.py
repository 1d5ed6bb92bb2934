"""`TransformerConfig` and its parts, position schemes, named sizes, and checks for fields."""

from jaxformer.config.checks import (
    check_at_least,
    check_choices,
    check_fraction,
    check_pattern,
    check_types,
)
from jaxformer.config.named_sizes import (
    BERT_BASE,
    GPT2,
    LLAMA3_8B,
    TRANSFORMER_BASE,
    TRANSFORMER_BIG,
)
from jaxformer.config.parts import (
    AttentionOptions,
    EmbeddingOptions,
    EncoderOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
)
from jaxformer.config.positions import (
    Alibi,
    Learned,
    NoPositions,
    PositionScheme,
    Relative,
    Rotary,
    Rotation,
    Sinusoidal,
    positional_encoding,
    rotate,
)
from jaxformer.config.rotary_scaling import Linear, Llama3, NoScaling, Yarn
from jaxformer.config.transformer import TransformerConfig, dotted_fields, with_fields

__all__ = [
    "BERT_BASE",
    "GPT2",
    "LLAMA3_8B",
    "TRANSFORMER_BASE",
    "TRANSFORMER_BIG",
    "Alibi",
    "AttentionOptions",
    "EmbeddingOptions",
    "EncoderOptions",
    "FeedForwardOptions",
    "Learned",
    "Linear",
    "Llama3",
    "NoPositions",
    "NoScaling",
    "NormOptions",
    "OutputOptions",
    "PositionScheme",
    "Relative",
    "Rotary",
    "Rotation",
    "Sinusoidal",
    "TransformerConfig",
    "Yarn",
    "check_at_least",
    "check_choices",
    "check_fraction",
    "check_pattern",
    "check_types",
    "dotted_fields",
    "positional_encoding",
    "rotate",
    "with_fields",
]
