"""Functional Transformers in JAX and Flax: encoder-decoder, GPT and BERT from one set of modules.

The letters of every shape: B batch, T query length, S key length, N heads, K key/value heads,
H head size, D d_model, F d_ff, V vocabulary size. Beside them: W beams of a sentence, R = B x W
rows, L the room of a cache, P masked positions, Hv the size of a head's values.

A public name is imported when it is first used: `import jaxformer` alone loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from jaxformer.checkpoint import Checkpoints
    from jaxformer.config import (
        BERT_BASE,
        GPT2,
        LLAMA3_8B,
        TRANSFORMER_BASE,
        TRANSFORMER_BIG,
        Alibi,
        AttentionOptions,
        EmbeddingOptions,
        EncoderOptions,
        FeedForwardOptions,
        Learned,
        Llama3,
        NoPositions,
        NormOptions,
        OutputOptions,
        Places,
        PositionScheme,
        Relative,
        Rotary,
        Sinusoidal,
        TransformerConfig,
        Yarn,
        positional_encoding,
    )
    from jaxformer.decoding import (
        CompletionOptions,
        SamplingConfig,
        SearchConfig,
        TranslationOptions,
        beam_search,
        sample,
    )
    from jaxformer.distributed import replicated, sharded, single
    from jaxformer.errors import CheckpointError, ConfigError, DataError, Diverged, MissingExtra
    from jaxformer.nn import (
        Axes,
        Block,
        Cache,
        Classifier,
        DecoderOnly,
        Embedding,
        Encoder,
        EncoderDecoder,
        EncoderOnly,
        Ensemble,
        FeedForward,
        MaskedLanguageModel,
        MultiHeadAttention,
        Norm,
        Patched,
        Stack,
        parameter_axes,
        read_taps,
        stack_blocks,
        stack_members,
        tap,
        tap_names,
        unstack_blocks,
        with_attention_weights,
    )
    from jaxformer.ops.attention import AutoAttention
    from jaxformer.ops.cross_entropy import cross_entropy
    from jaxformer.ops.dropout import DropoutRng
    from jaxformer.ops.masks import AttentionMask
    from jaxformer.pipelines import complete, embed, make_step_fn, score, translate
    from jaxformer.pipelines.fill_mask import fill_mask
    from jaxformer.pretrained import load_pretrained, save_pretrained
    from jaxformer.pretrained.loaded import Loaded
    from jaxformer.pretrained.loading import load
    from jaxformer.text.data import (
        MaskedBatch,
        MaskedStream,
        PairBatch,
        Stream,
        StreamBatch,
        bucket_pairs,
    )
    from jaxformer.text.metrics import score_translations
    from jaxformer.text.tokenizers import BOS, EOS, PAD, Tokenizer, train_bpe
    from jaxformer.training import (
        OptimizerConfig,
        TrainState,
        causal_loss,
        init_train_state,
        make_optimizer,
        make_train_step,
        masked_loss,
        seq2seq_loss,
    )

__all__ = [
    "Alibi",
    "AttentionMask",
    "AttentionOptions",
    "AutoAttention",
    "Axes",
    "BERT_BASE",
    "BOS",
    "Block",
    "Cache",
    "CheckpointError",
    "Checkpoints",
    "Classifier",
    "CompletionOptions",
    "ConfigError",
    "DataError",
    "DecoderOnly",
    "Diverged",
    "DropoutRng",
    "EOS",
    "Embedding",
    "EmbeddingOptions",
    "Encoder",
    "EncoderDecoder",
    "EncoderOnly",
    "EncoderOptions",
    "Ensemble",
    "FeedForward",
    "FeedForwardOptions",
    "GPT2",
    "LLAMA3_8B",
    "Learned",
    "Llama3",
    "Loaded",
    "MaskedBatch",
    "MaskedLanguageModel",
    "MaskedStream",
    "MissingExtra",
    "MultiHeadAttention",
    "NoPositions",
    "Norm",
    "NormOptions",
    "OptimizerConfig",
    "OutputOptions",
    "PAD",
    "PairBatch",
    "Patched",
    "Places",
    "PositionScheme",
    "Relative",
    "Rotary",
    "SamplingConfig",
    "SearchConfig",
    "Sinusoidal",
    "Stack",
    "Stream",
    "StreamBatch",
    "TRANSFORMER_BASE",
    "TRANSFORMER_BIG",
    "Tokenizer",
    "TrainState",
    "TransformerConfig",
    "TranslationOptions",
    "Yarn",
    "__version__",
    "beam_search",
    "bucket_pairs",
    "causal_loss",
    "complete",
    "cross_entropy",
    "embed",
    "fill_mask",
    "init_train_state",
    "load",
    "load_pretrained",
    "make_optimizer",
    "make_step_fn",
    "make_train_step",
    "masked_loss",
    "parameter_axes",
    "positional_encoding",
    "read_taps",
    "replicated",
    "sample",
    "save_pretrained",
    "score",
    "score_translations",
    "seq2seq_loss",
    "sharded",
    "single",
    "stack_blocks",
    "stack_members",
    "tap",
    "tap_names",
    "train_bpe",
    "translate",
    "unstack_blocks",
    "with_attention_weights",
]

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
    "ops.attention": "AutoAttention",
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
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
        return getattr(importlib.import_module(f"jaxformer.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
