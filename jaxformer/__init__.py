"""Functional Transformers in JAX and Flax: encoder-decoder, GPT and BERT from one set of modules.

The letters of every shape: B batch, T query length, S key length, N heads, K key/value heads,
H head size, D d_model, F d_ff, V vocabulary size. Beside them: R rows (B sentences times their
W hypotheses), L the length of a cache, Hv the size of a head's values.

Names are loaded when they are first asked for.
"""

import importlib

_HOME = {
    "TransformerConfig": "config",
    "ConfigError": "config",
    "transformer_base": "config",
    "transformer_big": "config",
    "gpt2": "config",
    "bert_base": "config",
    "MissingExtra": "extras",
    "Mask": "masks",
    "Noise": "dropout",
    "Cache": "cache",
    "MultiHeadAttention": "attention",
    "Block": "blocks",
    "Stack": "blocks",
    "EncoderDecoder": "models",
    "DecoderOnly": "models",
    "EncoderOnly": "models",
    "MaskedLanguageModel": "heads",
    "Classifier": "heads",
    "cross_entropy": "losses",
    "seq2seq_loss": "losses",
    "causal_loss": "losses",
    "masked_loss": "losses",
    "Tokenizer": "tokenizers",
    "train_bpe": "tokenizers",
    "DataError": "tokenizers",
    "bucket_pairs": "data",
    "Stream": "data",
    "MaskedStream": "data",
    "score_translations": "metrics",
    "OptimizerConfig": "optimizer",
    "make_optimizer": "optimizer",
    "TrainState": "training",
    "make_train_step": "training",
    "Diverged": "training",
    "replicate": "parallel",
    "partition": "parallel",
    "Checkpoints": "checkpoint",
    "CheckpointError": "checkpoint",
    "beam_search": "decoding",
    "sample": "decoding",
    "load_pretrained": "pretrained",
    "save_pretrained": "pretrained",
    "translate": "generation",
    "complete": "generation",
    "fill_mask": "generation",
    "embed": "generation",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxformer.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
