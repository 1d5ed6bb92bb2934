"""Llama (Touvron et al. 2023): RMS norm, rotary positions, gated layers, shared key/value heads."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    EnumField,
    Family,
    Field,
    as_text,
    parse_number,
    unsupported,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import Entry, attention, dense, entry, linear, norm, zero_entry


class _Rotary(NamedTuple):
    """The base of rotary positions, which newer versions store in an object."""

    @property
    def keys(self) -> Sequence[str]:
        """The keys."""
        return ("rope_theta", "rope_parameters", "rope_scaling")

    def read(self, hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Our field; `ConfigError` for scaled positions."""
        base = hf.get("rope_theta")
        for key in ("rope_parameters", "rope_scaling"):
            rope = hf.get(key) or {}
            if not isinstance(rope, dict):
                raise ConfigError(f"{key}={as_text(rope)}, but it must be an object")
            for name in ("rope_type", "type"):
                if rope.get(name, "default") not in (None, "default"):
                    raise unsupported(f"{key}.{name}", rope[name], "default")
            for name in rope.keys() - {"rope_theta", "rope_type", "type"}:
                raise ConfigError(f"{key}.{name}={as_text(rope[name])} is not supported: remove it")
            base = rope.get("rope_theta", base)
        base = 10_000.0 if base is None else base
        return {"rotary_base": parse_number("rope_theta", base, float)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The keys and their values."""
        base = config.rotary_base
        return {
            "rope_theta": base,
            "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        }


class _Biases(NamedTuple):
    """Biases of attention and feed-forward layers; with one kind ours has both, the other zero."""

    @property
    def keys(self) -> Sequence[str]:
        """The keys."""
        return ("attention_bias", "mlp_bias")

    def read(self, hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Our field."""
        return {"use_bias": any([parse_number(key, hf.get(key, False), bool) for key in self.keys])}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Both keys with the same value."""
        return dict.fromkeys(self.keys, config.use_bias)


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a Llama with its output layer or a classifier."""
    body, config = spec.body, spec.config
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if spec.kind == "decoder_classifier":
        entries = [entry(f"{body}embedding/table", embedding)]
        entries += [entry("head/kernel", "score.weight", linear()), zero_entry("head/bias")]
    elif not config.ties_output:
        entries = [
            entry(f"{body}embedding/table", embedding),
            entry("output/kernel", output, linear()),
        ]
    else:
        entries = [Entry((f"{body}embedding/table",), (embedding, output))]
    for i in range(config.num_decoder_layers):
        entries += _block(f"{body}decoder/blocks_{i}", f"model.layers.{i}", hf, config.use_bias)
    return [*entries, *norm(f"{body}decoder/final_norm", "model.norm", bias=False)]


def _block(jax: str, hf: str, config_json: Mapping[str, Any], use_bias: bool) -> list[Entry]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    has = {key: bool(config_json.get(key)) for key in ("attention_bias", "mlp_bias")}
    entries = [
        *norm(f"{jax}/attention_norm", f"{hf}.input_layernorm", bias=False),
        *attention(f"{jax}/attention", f"{hf}.self_attn", names, has["attention_bias"]),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.post_attention_layernorm", bias=False),
    ]
    for name in ("gate", "up", "down"):
        bias = has["mlp_bias"]
        entries += dense(f"{jax}/feed_forward/{name}", f"{hf}.mlp.{name}_proj", bias)
    if use_bias and not has["attention_bias"]:
        entries += [
            zero_entry(f"{jax}/attention/{x}/bias") for x in ("query", "key", "value", "out")
        ]
    if use_bias and not has["mlp_bias"]:
        entries += [zero_entry(f"{jax}/feed_forward/{x}/bias") for x in ("gate", "up", "down")]
    return entries


LLAMA = Family(
    model_type="llama",
    architectures={
        "LlamaForCausalLM": "decoder",
        "LlamaModel": "bare_decoder",
        "LlamaForSequenceClassification": "decoder_classifier",
    },
    constants={
        "positions": "rotary",
        "norm": "rms",
        "norm_placement": "pre",
        "gated": True,
        "scale_embeddings": False,
        "initializer": "normal",
    },
    settings=(
        Field("vocab_size", "vocab_size", 32_000),
        Field("max_position_embeddings", "max_len", 2048),
        Field("hidden_size", "d_model", 4096),
        Field("num_hidden_layers", "num_decoder_layers", 32),
        Field("num_attention_heads", "num_heads", 32),
        Field("num_key_value_heads", "num_kv_heads", None),
        Field("head_dim", "head_dim", None),
        Field("intermediate_size", "d_ff", 11_008),
        EnumField("hidden_act", "activation", "silu", ACTIVATIONS),
        EnumField("tie_word_embeddings", "tied_embeddings", False, {True: "output", False: "none"}),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("attention_dropout", "attention_dropout_rate", 0.0),
        _Rotary(),
        _Biases(),
    ),
    weight_map=weight_map,
    prefix="model.",
    head_prefixes=("lm_head.", "score."),
    ignored_tensors=r"\.rotary_emb\.inv_freq$",
    ignored_keys=frozenset({"pretraining_tp"}),
    classifier_tensor="score.weight",
)
