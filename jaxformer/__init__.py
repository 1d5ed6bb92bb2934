"""Functional Transformers in JAX and Flax: encoder-decoder, GPT and BERT from one set of modules.

The letters of every shape: B batch, T query length, S key length, N heads, K key/value heads,
H head size, D d_model, F d_ff, V vocabulary size. Beside them: W beams of a sentence, R = B x W
rows, L the room of a cache, P masked positions, Hv the size of a head's values.

A public name is imported when it is first used: `import jaxformer` alone loads nothing else.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

# The names of each module, as in `__init__.pyi` (a test holds the two equal).
_NAMES = {
    "checkpoint": "Checkpoints",
    "config": """
        BERT_BASE GPT2 LLAMA3_8B TRANSFORMER_BASE TRANSFORMER_BIG Alibi AttentionOptions
        EmbeddingOptions FeedForwardOptions Learned Llama3 NoPositions
        NormOptions OutputOptions PositionScheme Relative Rotary Sinusoidal TransformerConfig
        WindowOptions Yarn positional_encoding""",
    "decoding": """
        CompletionOptions SamplingConfig SearchConfig TranslationOptions beam_search sample""",
    "distributed": "replicated sharded single",
    "errors": "CheckpointError ConfigError DataError Diverged MissingExtra",
    "nn.attention": "MultiHeadAttention",
    "nn.axes": "Axes parameter_axes",
    "nn.blocks": "Block",
    "nn.cache": "Cache",
    "nn.embeddings": "Embedding",
    "nn.feed_forward": "FeedForward",
    "nn.heads": "Classifier MaskedLanguageModel",
    "nn.inspection": "Patched read_taps tap_names with_attention_weights",
    "nn.models": "DecoderOnly EncoderDecoder EncoderOnly",
    "nn.norm": "Norm",
    "nn.stack": "Encoder Stack",
    "nn.stacked_blocks": "stack_blocks unstack_blocks",
    "nn.taps": "tap",
    "ops.attention": "auto_attention",
    "ops.cross_entropy": "cross_entropy",
    "ops.dropout": "DropoutRng",
    "ops.masks": "AttentionMask",
    "pipelines": "complete embed make_step_fn score translate",
    "pipelines.ensemble": "Ensemble stack_members",
    "pipelines.fill_mask": "fill_mask",
    "pretrained": "load_pretrained save_pretrained",
    "pretrained.loaded": "Loaded",
    "pretrained.loading": "load open_folder",
    "text.data": "MaskedBatch MaskedStream PairBatch Stream StreamBatch bucket_pairs",
    "text.metrics": "score_translations",
    "text.tokenizers": "BOS EOS PAD Tokenizer train_bpe",
    "training": """
        OptimizerConfig TrainState causal_loss init_train_state make_optimizer make_train_step
        masked_loss seq2seq_loss with_learning_rate""",
}
_FOLDERS = {module.partition(".")[0] for module in _NAMES}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"jaxformer.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    module = importlib.import_module(f"jaxformer.{_MODULE_OF[name]}")
    names = _NAMES[_MODULE_OF[name]].split()
    globals().update({each: getattr(module, each) for each in names})  # looked up once
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
