"""The modules of a Transformer, as the papers write them."""

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.blocks import REMAT, Block, MakeBlock, Stack
from jaxformer.nn.cache import Cache, init_cache
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, MaskedLMOutput
from jaxformer.nn.int8 import Int8, quantize
from jaxformer.nn.layers import AddPositions, Embedding, FeedForward, LMHead, Norm, RelativeBias
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly, EncoderOutput

__all__ = [
    "REMAT",
    "AddPositions",
    "Block",
    "Cache",
    "Classifier",
    "DecoderOnly",
    "Embedding",
    "EncoderDecoder",
    "EncoderOnly",
    "EncoderOutput",
    "FeedForward",
    "Int8",
    "LMHead",
    "MakeBlock",
    "MaskedLMOutput",
    "MaskedLanguageModel",
    "MultiHeadAttention",
    "Norm",
    "RelativeBias",
    "Stack",
    "init_cache",
    "quantize",
]
