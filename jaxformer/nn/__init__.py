"""The modules of a Transformer, as the papers write them."""

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.axes import Axes, parameter_axes
from jaxformer.nn.blocks import REMAT, Block, Encoder, MakeBlock
from jaxformer.nn.cache import Cache, init_cache
from jaxformer.nn.ensemble import Ensemble, stack_members
from jaxformer.nn.heads import (
    Classifier,
    MaskedLanguageModel,
    MaskedLMOutput,
    SpanPredictor,
    TokenClassifier,
)
from jaxformer.nn.inspection import Patched, read_taps, tap, tap_names, with_attention_weights
from jaxformer.nn.int8 import quantize
from jaxformer.nn.layers import Dropout, Embedding, FeedForward, LMHead, Norm
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly, EncoderOutput
from jaxformer.nn.stack import (
    Positions,
    ScannedStack,
    Stack,
    make_block,
    stack_blocks,
    unstack_blocks,
)

__all__ = [
    "REMAT",
    "Axes",
    "Block",
    "Cache",
    "Classifier",
    "DecoderOnly",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "EncoderOnly",
    "EncoderOutput",
    "Ensemble",
    "FeedForward",
    "LMHead",
    "MakeBlock",
    "MaskedLMOutput",
    "MaskedLanguageModel",
    "MultiHeadAttention",
    "Norm",
    "Patched",
    "Positions",
    "ScannedStack",
    "SpanPredictor",
    "Stack",
    "TokenClassifier",
    "init_cache",
    "make_block",
    "parameter_axes",
    "quantize",
    "read_taps",
    "stack_blocks",
    "stack_members",
    "tap",
    "tap_names",
    "unstack_blocks",
    "with_attention_weights",
]
