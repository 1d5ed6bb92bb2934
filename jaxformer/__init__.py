"""Functional Transformers in JAX and Flax: encoder-decoder, GPT and BERT from one set of modules.

The letters of every shape: B batch, T query length, S key length, N heads, K key/value heads,
H head size, D d_model, F d_ff, V vocabulary size. Beside them: W beams of a sentence, R = B x W
rows, L the room of a cache, P masked positions, Hv the size of a head's values.

A public name is imported when it is first used: `import jaxformer` alone loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # `as` makes a name public
    from jaxformer.checkpoint import Checkpoints as Checkpoints
    from jaxformer.config import BERT_BASE as BERT_BASE
    from jaxformer.config import GPT2 as GPT2
    from jaxformer.config import LLAMA3_8B as LLAMA3_8B
    from jaxformer.config import TRANSFORMER_BASE as TRANSFORMER_BASE
    from jaxformer.config import TRANSFORMER_BIG as TRANSFORMER_BIG
    from jaxformer.config import Alibi as Alibi
    from jaxformer.config import AttentionOptions as AttentionOptions
    from jaxformer.config import EmbeddingOptions as EmbeddingOptions
    from jaxformer.config import EncoderOptions as EncoderOptions
    from jaxformer.config import FeedForwardOptions as FeedForwardOptions
    from jaxformer.config import Learned as Learned
    from jaxformer.config import Llama3 as Llama3
    from jaxformer.config import NoPositions as NoPositions
    from jaxformer.config import NormOptions as NormOptions
    from jaxformer.config import OutputOptions as OutputOptions
    from jaxformer.config import Places as Places
    from jaxformer.config import PositionScheme as PositionScheme
    from jaxformer.config import Relative as Relative
    from jaxformer.config import Rotary as Rotary
    from jaxformer.config import Sinusoidal as Sinusoidal
    from jaxformer.config import TransformerConfig as TransformerConfig
    from jaxformer.config import Yarn as Yarn
    from jaxformer.config import positional_encoding as positional_encoding
    from jaxformer.decoding import CompletionOptions as CompletionOptions
    from jaxformer.decoding import SamplingConfig as SamplingConfig
    from jaxformer.decoding import SearchConfig as SearchConfig
    from jaxformer.decoding import TranslationOptions as TranslationOptions
    from jaxformer.decoding import beam_search as beam_search
    from jaxformer.decoding import sample as sample
    from jaxformer.distributed import replicated as replicated
    from jaxformer.distributed import sharded as sharded
    from jaxformer.distributed import single as single
    from jaxformer.errors import CheckpointError as CheckpointError
    from jaxformer.errors import ConfigError as ConfigError
    from jaxformer.errors import DataError as DataError
    from jaxformer.errors import Diverged as Diverged
    from jaxformer.errors import MissingExtra as MissingExtra
    from jaxformer.nn import Axes as Axes
    from jaxformer.nn import Block as Block
    from jaxformer.nn import Cache as Cache
    from jaxformer.nn import Classifier as Classifier
    from jaxformer.nn import DecoderOnly as DecoderOnly
    from jaxformer.nn import Embedding as Embedding
    from jaxformer.nn import Encoder as Encoder
    from jaxformer.nn import EncoderDecoder as EncoderDecoder
    from jaxformer.nn import EncoderOnly as EncoderOnly
    from jaxformer.nn import Ensemble as Ensemble
    from jaxformer.nn import FeedForward as FeedForward
    from jaxformer.nn import MaskedLanguageModel as MaskedLanguageModel
    from jaxformer.nn import MultiHeadAttention as MultiHeadAttention
    from jaxformer.nn import Norm as Norm
    from jaxformer.nn import Patched as Patched
    from jaxformer.nn import Stack as Stack
    from jaxformer.nn import parameter_axes as parameter_axes
    from jaxformer.nn import read_taps as read_taps
    from jaxformer.nn import stack_blocks as stack_blocks
    from jaxformer.nn import stack_members as stack_members
    from jaxformer.nn import tap as tap
    from jaxformer.nn import tap_names as tap_names
    from jaxformer.nn import unstack_blocks as unstack_blocks
    from jaxformer.nn import with_attention_weights as with_attention_weights
    from jaxformer.ops.attention import auto_attention as auto_attention
    from jaxformer.ops.cross_entropy import cross_entropy as cross_entropy
    from jaxformer.ops.dropout import DropoutRng as DropoutRng
    from jaxformer.ops.masks import AttentionMask as AttentionMask
    from jaxformer.pipelines import complete as complete
    from jaxformer.pipelines import embed as embed
    from jaxformer.pipelines import make_step_fn as make_step_fn
    from jaxformer.pipelines import score as score
    from jaxformer.pipelines import translate as translate
    from jaxformer.pipelines.fill_mask import fill_mask as fill_mask
    from jaxformer.pretrained import load_pretrained as load_pretrained
    from jaxformer.pretrained import save_pretrained as save_pretrained
    from jaxformer.pretrained.loaded import Loaded as Loaded
    from jaxformer.pretrained.loading import load as load
    from jaxformer.text.data import MaskedBatch as MaskedBatch
    from jaxformer.text.data import MaskedStream as MaskedStream
    from jaxformer.text.data import PairBatch as PairBatch
    from jaxformer.text.data import Stream as Stream
    from jaxformer.text.data import StreamBatch as StreamBatch
    from jaxformer.text.data import bucket_pairs as bucket_pairs
    from jaxformer.text.metrics import score_translations as score_translations
    from jaxformer.text.tokenizers import BOS as BOS
    from jaxformer.text.tokenizers import EOS as EOS
    from jaxformer.text.tokenizers import PAD as PAD
    from jaxformer.text.tokenizers import Tokenizer as Tokenizer
    from jaxformer.text.tokenizers import train_bpe as train_bpe
    from jaxformer.training import OptimizerConfig as OptimizerConfig
    from jaxformer.training import TrainState as TrainState
    from jaxformer.training import causal_loss as causal_loss
    from jaxformer.training import init_train_state as init_train_state
    from jaxformer.training import make_optimizer as make_optimizer
    from jaxformer.training import make_train_step as make_train_step
    from jaxformer.training import masked_loss as masked_loss
    from jaxformer.training import seq2seq_loss as seq2seq_loss

# The names of each module, as in the imports above (a test holds the two equal).
_NAMES = {
    "checkpoint": "Checkpoints",
    "config": """
        BERT_BASE GPT2 LLAMA3_8B TRANSFORMER_BASE TRANSFORMER_BIG Alibi AttentionOptions
        EmbeddingOptions EncoderOptions FeedForwardOptions Learned Llama3 NoPositions
        NormOptions OutputOptions Places PositionScheme Relative Rotary Sinusoidal
        TransformerConfig Yarn positional_encoding""",
    "decoding": """
        CompletionOptions SamplingConfig SearchConfig TranslationOptions beam_search sample""",
    "distributed": "replicated sharded single",
    "errors": "CheckpointError ConfigError DataError Diverged MissingExtra",
    "nn": """
        Axes Block Cache Classifier DecoderOnly Embedding Encoder EncoderDecoder EncoderOnly
        Ensemble FeedForward MaskedLanguageModel MultiHeadAttention Norm Patched Stack
        parameter_axes read_taps stack_blocks stack_members tap tap_names unstack_blocks
        with_attention_weights""",
    "ops.attention": "auto_attention",
    "ops.cross_entropy": "cross_entropy",
    "ops.dropout": "DropoutRng",
    "ops.masks": "AttentionMask",
    "pipelines": "complete embed make_step_fn score translate",
    "pipelines.fill_mask": "fill_mask",
    "pretrained": "load_pretrained save_pretrained",
    "pretrained.loaded": "Loaded",
    "pretrained.loading": "load",
    "text.data": "MaskedBatch MaskedStream PairBatch Stream StreamBatch bucket_pairs",
    "text.metrics": "score_translations",
    "text.tokenizers": "BOS EOS PAD Tokenizer train_bpe",
    "training": """
        OptimizerConfig TrainState causal_loss init_train_state make_optimizer
        make_train_step masked_loss seq2seq_loss""",
}
_FOLDERS = {module.partition(".")[0] for module in _NAMES}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every name
    __all__ = sorted([*_MODULE_OF, "__version__"])

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"jaxformer.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
        return getattr(importlib.import_module(f"jaxformer.{_MODULE_OF[name]}"), name)

    def __dir__() -> list[str]:
        return __all__
