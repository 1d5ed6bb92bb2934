"""T5 (Raffel et al. 2020), T5 1.1 and mT5: pre-norm, RMSNorm, relative positions, no biases."""

import math
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

from jaxformer.config import Relative, TransformerConfig, with_fields
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    Family,
    Setting,
    const_field,
    field,
    parse_number,
    unsupported,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import SAME, Entry, dense, entry, linear, norm, scaled

_OUTPUT = "lm_head.weight"
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a T5, or of its encoder alone.

    T5 does not divide attention logits by sqrt(d_k), and with a tied output it multiplies the last
    hidden states by d_model^-0.5. The query kernels and the decoder's last norm contain these
    factors here.
    """
    config = spec.config
    tied = spec.kind == "encoder_decoder" and config.ties_output
    entries = [Entry(("embedding/table",), (*_EMBEDDINGS, *((_OUTPUT,) if tied else ())))]
    entries += _stack(config, "encoder", config.num_encoder_layers)
    if spec.kind == "encoder_decoder":
        entries += _stack(config, "decoder", config.num_decoder_layers)
        factor = config.d_model**-0.5 if tied and _is_scaled(hf) else 1.0
        last = "decoder/final_norm/scale", "decoder.final_layer_norm.weight"
        entries += [entry(*last, scaled(SAME, factor))]
        entries += [] if tied else [entry("output/kernel", _OUTPUT, linear())]
    return [*entries, *norm("encoder/final_norm", "encoder.final_layer_norm", bias=False)]


def _stack(config: TransformerConfig, stack: str, layers: int) -> list[Entry]:
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [entry(f"{stack}/positions/relative_bias", bias)]
    parts = {"attention": "SelfAttention", "feed_forward": "DenseReluDense"}
    if stack == "decoder":
        parts = {
            "attention": "SelfAttention",
            "cross_attention": "EncDecAttention",
            "feed_forward": "DenseReluDense",
        }
    for i in range(layers):
        for j, (part, name) in enumerate(parts.items()):
            jax, hf = f"{stack}/blocks_{i}/{part}", f"{stack}.block.{i}.layer.{j}"
            entries += norm(f"{jax}_norm", f"{hf}.layer_norm", bias=False)
            make = _feed_forward if part == "feed_forward" else _attention
            entries += make(config, jax, f"{hf}.{name}")
    return entries


def _attention(config: TransformerConfig, jax: str, hf: str) -> list[Entry]:
    query = scaled(linear(), math.sqrt(config.key_size))
    return [
        *dense(f"{jax}/query", f"{hf}.q", False, kernel=query),
        *dense(f"{jax}/key", f"{hf}.k", False),
        *dense(f"{jax}/value", f"{hf}.v", False),
        *dense(f"{jax}/out", f"{hf}.o", False, kernel=linear(inputs=2)),
    ]


def _feed_forward(config: TransformerConfig, jax: str, hf: str) -> list[Entry]:
    names = {"gate": "wi_0", "up": "wi_1"} if config.feed_forward.gated else {"up": "wi"}
    pairs = (names | {"down": "wo"}).items()
    return [row for a, b in pairs for row in dense(f"{jax}/{a}", f"{hf}.{b}", False)]


def _read_projection(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields; `ConfigError` for an unknown activation."""
    projection = hf.get("feed_forward_proj", "relu" if hf["model_type"] == "t5" else "gated-gelu")
    name = projection.removeprefix("gated-") if isinstance(projection, str) else ""
    if name not in ACTIVATIONS:
        gated = (f"gated-{name}" for name in ACTIVATIONS)
        raise unsupported("feed_forward_proj", projection, *ACTIVATIONS, *gated)
    # gelu in T5 1.1 is the approximation by tanh.
    activation = "gelu_tanh" if projection == "gated-gelu" else ACTIVATIONS[name]
    return {"feed_forward.activation": activation, "feed_forward.gated": name != projection}


def _write_projection(config: TransformerConfig) -> dict[str, Any]:
    activation, gated = config.feed_forward.activation, config.feed_forward.gated
    if gated and activation == "gelu_tanh":
        return {"feed_forward_proj": "gated-gelu"}
    if gated and activation == "gelu":
        raise ConfigError("gated layers with activation='gelu' are not supported: use 'gelu_tanh'")
    name = next(name for name, jax in ACTIVATIONS.items() if jax == activation)
    return {"feed_forward_proj": f"gated-{name}" if gated else name}


def _read_dropout(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The three fields."""
    rate = parse_number("dropout_rate", hf.get("dropout_rate", 0.1), float)
    names = ("dropout_rate", "attention.dropout_rate", "feed_forward.dropout_rate")
    return dict.fromkeys(names, rate)


_TYING = Setting(
    ("tie_word_embeddings", "scale_decoder_outputs"),
    lambda hf, _: {"embeddings.tied": "all" if _is_scaled(hf) else "inputs"},
    lambda config: {"tie_word_embeddings": config.ties_output},
)
"""Whether the output is the transpose of the embedding: in T5, but not in T5 1.1."""


def _is_scaled(hf: Mapping[str, Any]) -> bool:
    """Whether outputs are multiplied by d_model^-0.5; in T5 `tie_word_embeddings` implies it.

    mT5 never does it, and its folders say both of `tie_word_embeddings`.
    """
    implied = hf.get("tie_word_embeddings", True) if hf["model_type"] == "t5" else False
    return parse_number("scale_decoder_outputs", hf.get("scale_decoder_outputs", implied), bool)


def adapt(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` with a tied output, scaled or not, if the folder has no output layer."""
    if _OUTPUT in names or spec.kind != "encoder_decoder":
        return spec
    return spec._replace(config=with_fields(spec.config, {"embeddings.tied": "all"}))


def _family(model_type: str, name: str, sizes: tuple[int, int, int, int]) -> Family:
    """A family of classes `name`; the sizes are those of a config.json without them.

    `sizes` are those of the vocabulary and the feed-forward network, and the numbers of layers and
    heads.
    """
    vocab_size, d_ff, layers, heads = sizes
    return Family(
        model_type=model_type,
        architectures={
            f"{name}ForConditionalGeneration": "encoder_decoder",
            f"{name}WithLMHeadModel": "encoder_decoder",
            f"{name}EncoderModel": "encoder",
        },
        constants={
            "positions": Relative(),
            "norm.kind": "rms",
            "norm.placement": "pre",
            "use_bias": False,
            "embeddings.scale": False,
        },
        settings=(
            field("vocab_size", "vocab_size", vocab_size),
            field("n_positions", "max_len", 512),
            field("d_model", "d_model", 512),
            field("d_kv", "head_dim", 64, value_of=attrgetter("key_size")),
            field("d_ff", "d_ff", d_ff),
            field("num_layers", "num_encoder_layers", layers),
            field("num_decoder_layers", "num_decoder_layers", lambda x: x["num_encoder_layers"]),
            field("num_heads", "num_heads", heads),
            field("relative_attention_num_buckets", "positions.buckets", 32),
            field("relative_attention_max_distance", "positions.max_distance", 128),
            field("layer_norm_epsilon", "norm.eps", 1e-6),
            Setting(("feed_forward_proj",), _read_projection, _write_projection),
            Setting(
                ("dropout_rate",),
                _read_dropout,
                lambda config: {"dropout_rate": config.dropout_rate},
            ),
            _TYING,
            const_field("is_decoder", False),
        ),
        weight_map=weight_map,
        prefix="",
        head_prefixes=(),
        adapt=adapt,
        # Stored by early versions, but never used.
        ignored_tensors=(
            r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"
        ),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        # The activation and the gate repeat feed_forward_proj.
        ignored_keys=frozenset(
            """initializer_factor classifier_dropout dense_act_fn
            is_gated_act""".split()
        ),
    )


T5 = _family("t5", "T5", (32_128, 2048, 6, 8))
"""`n_positions` is the length of training; relative positions have no limit."""
MT5 = _family("mt5", "MT5", (250_112, 1024, 8, 6))
"""Xue et al. 2021: T5 1.1 of a hundred languages."""
