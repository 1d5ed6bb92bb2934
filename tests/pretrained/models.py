"""One small model of each family and kind, with all that the family may differ in."""

from dataclasses import replace

import numpy as np
import tokenizers

from jaxformer.config import (
    EmbeddingOptions,
    ExpertOptions,
    FeedForwardOptions,
    Learned,
    Linear,
    NormOptions,
    OutputOptions,
    Relative,
    Rotary,
    Sinusoidal,
    TransformerConfig,
    with_fields,
)
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.text.tokenizers import Tokenizer
from tests.configs import changed

TOKENS = np.array([[1, 5, 7, 2, 22], [3, 9, 4, 0, 0]])


def word_tokenizer(names):
    """A tokenizer of the words `names`, by their ids; those that begin with "<" are special."""
    ids = {word: i for i, word in enumerate(names)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens([name for name in names if name.startswith("<")])
    return Tokenizer(words)


def inputs_of(model):
    """The arrays that initialize `model`."""
    if isinstance(model, Classifier | TokenClassifier | SpanPredictor):
        return TOKENS, TOKENS > 0
    return (TOKENS, TOKENS % 19) if isinstance(model, EncoderDecoder) else (TOKENS,)


GPT2 = with_fields(
    TransformerConfig(23, d_model=10, d_ff=17, num_heads=5, num_decoder_layers=2, max_len=11),
    {
        "positions": Learned(),
        "norm.placement": "pre",
        "norm.eps": 1e-5,
        "feed_forward.activation": "gelu_tanh",
        "embeddings.tied": "output",
        "embeddings.scale": False,
        "initializer": "normal",  # as of a loaded model, so both are one to a cache
    },
)
LLAMA = with_fields(
    GPT2,
    {
        "num_heads": 6,
        "attention.num_kv_heads": 3,
        "head_dim": 4,
        "positions": Rotary(base=77.0),
        "norm.kind": "rms",
        "feed_forward.activation": "silu",
        "feed_forward.gated": True,
        "use_bias": False,
        "embeddings.tied": "none",
    },
)
DISTILBERT = with_fields(
    GPT2,
    {
        "num_encoder_layers": 2,
        "num_decoder_layers": 0,
        "norm.placement": "post",
        "norm.eps": 1e-12,
        "feed_forward.activation": "relu",
        "embeddings.norm": True,
    },
)
PLAIN_BERT = with_fields(DISTILBERT, {"embeddings.num_types": 3, "norm.eps": 1e-3})
PLAIN_ROBERTA = with_fields(
    PLAIN_BERT, {"embeddings.num_types": 1, "feed_forward.activation": "gelu"}
)
BERT, ROBERTA = (replace(config, pooler="tanh") for config in (PLAIN_BERT, PLAIN_ROBERTA))
QWEN2 = with_fields(LLAMA, {"head_dim": None, "d_model": 12, "attention.qkv_bias": True})
NEOX = with_fields(
    GPT2, {"d_model": 20, "positions": Rotary(fraction=0.5), "norm.placement": "parallel"}
)
GEMMA = with_fields(
    LLAMA,
    {"embeddings.scale": True, "embeddings.tied": "output", "feed_forward.activation": "gelu_tanh"},
)
GEMMA2 = with_fields(
    GEMMA,
    {
        "norm.placement": "sandwich",
        "window.size": 3,
        "window.full_every": 2,
        "attention.query_scalar": 24,
        "attention.softcap": 5.0,
        "output.softcap": 7.0,
    },
)
GEMMA3 = with_fields(
    GEMMA,
    {
        "norm.placement": "sandwich",
        "window.size": 3,
        "window.full_every": 2,
        "attention.query_scalar": 24,
        "attention.query_key_norm": True,
        "positions": Rotary(base=77.0, scaling=Linear(factor=3), window_base=5.0),
    },
)


def decoder(config, **changes):
    return DecoderOnly(changed(config, **changes))


# Heads of 4 and a width of 16: the square roots that T5's table holds are powers of two.
T5 = TransformerConfig(
    vocab_size=23,
    d_model=16,
    d_ff=17,
    num_heads=3,
    head_dim=4,
    num_encoder_layers=1,
    num_decoder_layers=2,
    max_len=11,
    norm=NormOptions("rms", placement="pre"),
    embeddings=EmbeddingOptions(scale=False),
    positions=Relative(buckets=6, max_distance=9),
    use_bias=False,
)
MARIAN = TransformerConfig(
    vocab_size=23,
    d_model=12,
    d_ff=17,
    num_heads=3,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_len=11,
    norm=NormOptions(eps=1e-5),
    feed_forward=FeedForwardOptions("silu"),
    output=OutputOptions(bias=True),
    positions=Sinusoidal(layout="halves"),
)
BART = with_fields(
    MARIAN,
    {
        "initializer": "normal",
        "positions": Learned(),
        "feed_forward.activation": "gelu",
        "embeddings.norm": True,
        "embeddings.scale": False,
    },
)
M2M100 = with_fields(
    MARIAN,
    {
        "initializer": "normal",
        "positions": Sinusoidal("halves", endpoint=True, offset=2),
        "feed_forward.activation": "relu",
        "norm.placement": "pre",
        "output.bias": False,
    },
)
GATED = {"feed_forward.activation": "gelu_tanh", "feed_forward.gated": True}


def model_of(config, changes):
    return EncoderDecoder(with_fields(config, changes))


MODELS = {
    "gpt2": ("gpt2", DecoderOnly(GPT2)),
    "gpt2, classes": ("gpt2", Classifier(DecoderOnly(GPT2), 3)),
    "llama": ("llama", DecoderOnly(LLAMA)),
    "llama, biases": ("llama", decoder(LLAMA, use_bias=True, attention__num_kv_heads=None)),
    "mistral": ("mistral", decoder(LLAMA, window__size=3)),
    "mixtral": ("mixtral", decoder(LLAMA, feed_forward__experts=ExpertOptions(3, top_k=2))),
    "qwen3_moe": (
        "qwen3_moe",
        decoder(
            LLAMA,
            attention__query_key_norm=True,
            feed_forward__experts=ExpertOptions(5, top_k=3, normalize=False),
        ),
    ),
    "qwen2": ("qwen2", DecoderOnly(QWEN2)),
    "qwen3": ("qwen3", decoder(LLAMA, attention__query_key_norm=True)),
    "olmo2": (
        "olmo2",
        decoder(
            LLAMA,
            attention__query_key_norm=True,
            attention__norm_over_heads=True,
            norm__placement="output",
            d_model=12,
            head_dim=None,
        ),
    ),
    "gemma": ("gemma", DecoderOnly(GEMMA)),
    "opt": ("opt", decoder(GPT2, feed_forward__activation="relu")),
    "gemma2": ("gemma2", DecoderOnly(GEMMA2)),
    "gemma3": ("gemma3_text", DecoderOnly(GEMMA3)),
    "gpt_neox": ("gpt_neox", decoder(NEOX, embeddings__tied="none")),
    "distilbert": ("distilbert", EncoderOnly(DISTILBERT)),
    "bert": ("bert", EncoderOnly(BERT)),
    "bert, masked": ("bert", MaskedLanguageModel(PLAIN_BERT)),
    "bert, masked and next": ("bert", MaskedLanguageModel(BERT)),
    "bert, classes": ("bert", Classifier(EncoderOnly(BERT), 3)),
    "bert, token classes": ("bert", TokenClassifier(EncoderOnly(PLAIN_BERT), 3)),
    "bert, spans": ("bert", SpanPredictor(EncoderOnly(PLAIN_BERT))),
    "roberta, token classes": ("roberta", TokenClassifier(EncoderOnly(PLAIN_ROBERTA), 3)),
    "roberta": ("roberta", EncoderOnly(ROBERTA)),
    "xlm-roberta, classes": ("xlm-roberta", Classifier(EncoderOnly(ROBERTA), 3)),
    "t5": ("t5", EncoderDecoder(T5)),
    "t5 1.1": ("t5", model_of(T5, {"embeddings.tied": "inputs", **GATED})),
    "t5's encoder": ("t5", EncoderOnly(with_fields(T5, {"feed_forward.activation": "silu"}))),
    "mt5": ("mt5", model_of(T5, {"embeddings.tied": "inputs", **GATED})),
    "bart": ("bart", EncoderDecoder(BART)),
    "mbart": ("mbart", model_of(BART, {"norm.placement": "pre"})),
    "m2m_100": ("m2m_100", EncoderDecoder(M2M100)),
    "marian": ("marian", EncoderDecoder(MARIAN)),
    "marian, two vocabularies": (
        "marian",
        model_of(MARIAN, {"embeddings.tied": "output", "source_vocab_size": 19}),
    ),
}
# Another family comes first that has these models.
SHADOWED = ("roberta", "xlm-roberta", "opt", "mt5")
