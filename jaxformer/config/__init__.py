"""`TransformerConfig`, the named sizes of the papers, and checks for configuration fields."""

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
from jaxformer.config.transformer import (
    Activation,
    Positions,
    RotaryScaling,
    SinusoidalLayout,
    TiedEmbeddings,
    TransformerConfig,
)

__all__ = [
    "BERT_BASE",
    "GPT2",
    "LLAMA3_8B",
    "TRANSFORMER_BASE",
    "TRANSFORMER_BIG",
    "Activation",
    "Positions",
    "RotaryScaling",
    "SinusoidalLayout",
    "TiedEmbeddings",
    "TransformerConfig",
    "check_at_least",
    "check_choices",
    "check_fraction",
    "check_pattern",
    "check_types",
]
