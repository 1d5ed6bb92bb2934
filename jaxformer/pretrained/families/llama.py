"""Llama (Touvron et al. 2023): RMS norm, rotary positions, gated layers, shared key/value heads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Named, number
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, attention, dense, norm, one, zero
from jaxformer.pretrained.transforms import linear


class _Rotary(NamedTuple):
    """The base of rotary positions, which later versions keep in an object."""

    @property
    def keys(self) -> Sequence[str]:
        return ("rope_theta", "rope_parameters", "rope_scaling")

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        base = theirs.get("rope_theta")
        for key in ("rope_parameters", "rope_scaling"):
            said = theirs.get(key) or {}
            plain = isinstance(said, dict) and said.keys() <= {"rope_theta", "rope_type", "type"}
            kinds = {said.get("rope_type"), said.get("type")} if plain else {key}
            if not kinds <= {None, "default"}:
                raise ConfigError(
                    f"{key}={json.dumps(said)[:80]} cannot be said here: only rope_type 'default'"
                )
            base = said.get("rope_theta", base)
        base = 10_000.0 if base is None else base
        return {"rotary_base": number("rope_theta", base, float)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        base = config.rotary_base
        return {
            "rope_theta": base,
            "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        }


class _Biases(NamedTuple):
    """Which linear maps have biases: all or none of ours; those that they lack are zero."""

    @property
    def keys(self) -> Sequence[str]:
        return ("attention_bias", "mlp_bias")

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_bias": any([number(key, theirs.get(key, False), bool) for key in self.keys])}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return dict.fromkeys(self.keys, config.use_bias)


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a Llama with its output or a classifier on it."""
    ours, config = subject.body, subject.config
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if subject.kind == "decoder_classifier":
        rows = [one(f"{ours}embedding/table", embedding)]
        rows += [one("head/kernel", "score.weight", linear()), zero("head/bias")]
    elif not config.ties_output:
        rows = [one(f"{ours}embedding/table", embedding), one("output/kernel", output, linear())]
    else:
        rows = [Row((f"{ours}embedding/table",), (embedding, output))]
    for i in range(config.num_decoder_layers):
        rows += _block(f"{ours}decoder/blocks_{i}", f"model.layers.{i}", theirs, config.use_bias)
    return [*rows, *norm(f"{ours}decoder/final_norm", "model.norm", bias=False)]


def _block(ours: str, theirs: str, facts: Mapping[str, Any], ours_have: bool) -> list[Row]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    has = {key: bool(facts.get(key)) for key in ("attention_bias", "mlp_bias")}
    rows = [
        *norm(f"{ours}/attention_norm", f"{theirs}.input_layernorm", bias=False),
        *attention(f"{ours}/attention", f"{theirs}.self_attn", names, has["attention_bias"]),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.post_attention_layernorm", bias=False),
    ]
    for name in ("gate", "up", "down"):
        bias = has["mlp_bias"]
        rows += dense(f"{ours}/feed_forward/{name}", f"{theirs}.mlp.{name}_proj", bias)
    if ours_have and not has["attention_bias"]:
        rows += [zero(f"{ours}/attention/{x}/bias") for x in ("query", "key", "value", "out")]
    if ours_have and not has["mlp_bias"]:
        rows += [zero(f"{ours}/feed_forward/{x}/bias") for x in ("gate", "up", "down")]
    return rows


FAMILY = Family(
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
        Copied("vocab_size", "vocab_size", 32_000),
        Copied("max_position_embeddings", "max_len", 2048),
        Copied("hidden_size", "d_model", 4096),
        Copied("num_hidden_layers", "num_decoder_layers", 32),
        Copied("num_attention_heads", "num_heads", 32),
        Copied("num_key_value_heads", "num_kv_heads", None),
        Copied("head_dim", "head_dim", None),
        Copied("intermediate_size", "d_ff", 11_008),
        Named("hidden_act", "activation", "silu", ACTIVATIONS),
        Named("tie_word_embeddings", "tied_embeddings", False, {True: "output", False: "none"}),
        Copied("rms_norm_eps", "norm_eps", 1e-6),
        Copied("attention_dropout", "attention_dropout_rate", 0.0),
        _Rotary(),
        _Biases(),
    ),
    table=table,
    prefix="model.",
    heads=("lm_head.", "score."),
    ignored=r"\.rotary_emb\.inv_freq$",
    free=frozenset({"pretraining_tp"}),
    head="score.weight",
)
