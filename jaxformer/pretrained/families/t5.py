"""T5 (Raffel et al. 2020), T5 1.1 and mT5: pre-norm, RMSNorm, relative positions, no biases."""

import math
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

from jaxformer.config import Relative, TransformerConfig, with_fields
from jaxformer.errors import ConfigError
from jaxformer.pretrained import config_keys
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import SAME, Entry

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
    tables = (*_EMBEDDINGS, _OUTPUT) if tied else _EMBEDDINGS
    entries = [Entry(("embedding/table",), tables)]
    entries += _stack(config, "encoder", config.num_encoder_layers)
    if spec.kind == "encoder_decoder":
        entries += _stack(config, "decoder", config.num_decoder_layers)
        factor = config.d_model**-0.5 if tied and _is_scaled(hf) else 1.0
        entries += [
            maps.entry(
                "decoder/final_norm/scale",
                "decoder.final_layer_norm.weight",
                maps.scaled(SAME, factor),
            )
        ]
        if not tied:
            entries += [maps.entry("output/kernel", _OUTPUT, maps.linear())]
    return [*entries, *maps.norm("encoder/final_norm", "encoder.final_layer_norm", bias=False)]


def _stack(config: TransformerConfig, stack: str, layers: int) -> list[Entry]:
    """The entries of the encoder's or the decoder's positions and blocks."""
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [maps.entry(f"{stack}/positions/relative_bias", bias)]
    for i in range(layers):
        path, hf = f"{stack}/blocks_{i}", f"{stack}.block.{i}.layer"
        entries += _block(config, path, hf, cross=stack == "decoder")
    return entries


def _block(config: TransformerConfig, path: str, hf: str, *, cross: bool) -> list[Entry]:
    """The entries of a block, whose layers are numbered in the folder."""
    entries = _attention(config, f"{path}/attention", f"{hf}.0", "SelfAttention")
    feed_forward = f"{hf}.1"
    if cross:
        entries += _attention(config, f"{path}/cross_attention", f"{hf}.1", "EncDecAttention")
        feed_forward = f"{hf}.2"
    entries += maps.norm(f"{path}/feed_forward_norm", f"{feed_forward}.layer_norm", bias=False)
    names = {"up": "wi", "down": "wo"}
    if config.feed_forward.gated:
        names = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    for ours, theirs in names.items():
        name = f"{feed_forward}.DenseReluDense.{theirs}"
        entries += maps.dense(f"{path}/feed_forward/{ours}", name, bias=False)
    return entries


def _attention(config: TransformerConfig, path: str, hf: str, name: str) -> list[Entry]:
    """The entries of the attention at `path`, which is the module `name` of the layer `hf`."""
    scaled_queries = maps.scaled(maps.linear(), math.sqrt(config.key_size))
    return [
        *maps.norm(f"{path}_norm", f"{hf}.layer_norm", bias=False),
        maps.entry(f"{path}/query/kernel", f"{hf}.{name}.q.weight", scaled_queries),
        maps.entry(f"{path}/key/kernel", f"{hf}.{name}.k.weight", maps.linear()),
        maps.entry(f"{path}/value/kernel", f"{hf}.{name}.v.weight", maps.linear()),
        maps.entry(f"{path}/out/kernel", f"{hf}.{name}.o.weight", maps.linear(inputs=2)),
    ]


def _read_projection(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields; `ConfigError` for an unknown activation."""
    projection = hf.get("feed_forward_proj", "relu" if hf["model_type"] == "t5" else "gated-gelu")
    name = projection.removeprefix("gated-") if isinstance(projection, str) else ""
    if name not in config_keys.ACTIVATIONS:
        gated = (f"gated-{name}" for name in config_keys.ACTIVATIONS)
        raise config_keys.unsupported(
            "feed_forward_proj", projection, *config_keys.ACTIVATIONS, *gated
        )
    # gelu in T5 1.1 is the approximation by tanh.
    activation = "gelu_tanh" if projection == "gated-gelu" else config_keys.ACTIVATIONS[name]
    gated = name != projection
    repeated = hf.get("dense_act_fn")
    if repeated is not None and config_keys.ACTIVATIONS.get(repeated) != activation:
        raise ConfigError(f"dense_act_fn={config_keys.as_text(repeated)} does not fit {projection}")
    if hf.get("is_gated_act") not in (None, gated):
        raise ConfigError(
            f"is_gated_act={config_keys.as_text(not gated)} does not fit {projection}"
        )
    return {"feed_forward.activation": activation, "feed_forward.gated": gated}


def _write_projection(config: TransformerConfig) -> dict[str, Any]:
    activation, gated = config.feed_forward.activation, config.feed_forward.gated
    if gated and activation == "gelu_tanh":
        return {"feed_forward_proj": "gated-gelu"}
    if gated and activation == "gelu":
        raise ConfigError("gated layers with activation='gelu' are not supported: use 'gelu_tanh'")
    names = [name for name, ours in config_keys.ACTIVATIONS.items() if ours == activation]
    if not names:
        raise ConfigError(f"feed_forward.activation={activation!r} has no feed_forward_proj")
    return {"feed_forward_proj": f"gated-{names[0]}" if gated else names[0]}


def _read_dropout(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The three fields."""
    rate = config_keys.parse_number("dropout_rate", hf.get("dropout_rate", 0.1), float)
    names = ("dropout_rate", "attention.dropout_rate", "feed_forward.dropout_rate")
    return dict.fromkeys(names, rate)


_TYING = config_keys.Key(
    ("tie_word_embeddings", "scale_decoder_outputs"),
    lambda hf, _: {"embeddings.tied": "all" if _is_scaled(hf) else "inputs"},
    lambda config: {"tie_word_embeddings": config.ties_output},
)
"""Whether the output is the transpose of the embedding: in T5, but not in T5 1.1."""


def _encoder_layers(fields: Mapping[str, Any]) -> int:
    return fields["num_encoder_layers"]


def _is_scaled(hf: Mapping[str, Any]) -> bool:
    """Whether outputs are multiplied by d_model^-0.5; in T5 `tie_word_embeddings` implies it.

    mT5 never does it, and its folders say both of `tie_word_embeddings`.
    """
    implied = hf.get("tie_word_embeddings", True) if hf["model_type"] == "t5" else False
    name = "scale_decoder_outputs"
    return config_keys.parse_number(name, hf.get(name, implied), bool)


def adapt(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` with a tied output, scaled or not, if the folder has no output layer."""
    if _OUTPUT in names or spec.kind != "encoder_decoder":
        return spec
    return spec._replace(config=with_fields(spec.config, {"embeddings.tied": "all"}))


def _family(
    model_type: str, name: str, *, vocab_size: int, d_ff: int, layers: int, heads: int
) -> Family:
    """A family of classes `name`; the sizes stand for the ones that a config.json lacks."""
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
        keys=(
            config_keys.number("vocab_size", "vocab_size", vocab_size),
            config_keys.number("n_positions", "max_len", 512),
            config_keys.number("d_model", "d_model", 512),
            config_keys.number("d_kv", "head_dim", 64, value_of=attrgetter("key_size")),
            config_keys.number("d_ff", "d_ff", d_ff),
            config_keys.number("num_layers", "num_encoder_layers", layers),
            config_keys.number("num_decoder_layers", "num_decoder_layers", _encoder_layers),
            config_keys.number("num_heads", "num_heads", heads),
            config_keys.number("relative_attention_num_buckets", "positions.buckets", 32),
            config_keys.number("relative_attention_max_distance", "positions.max_distance", 128),
            config_keys.number("layer_norm_epsilon", "norm.eps", 1e-6),
            config_keys.Key(("feed_forward_proj",), _read_projection, _write_projection),
            config_keys.Key(
                ("dropout_rate",),
                _read_dropout,
                lambda config: {"dropout_rate": config.dropout_rate},
            ),
            _TYING,
            config_keys.constant("is_decoder", False),
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


T5 = _family("t5", "T5", vocab_size=32_128, d_ff=2048, layers=6, heads=8)
"""`n_positions` is the length of training; relative positions have no limit."""
MT5 = _family("mt5", "MT5", vocab_size=250_112, d_ff=1024, layers=8, heads=6)
"""Xue et al. 2021: T5 1.1 of a hundred languages."""
