"""OPT (Zhang et al. 2022): pre-norm, learned positions after two unused rows, relu."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned
from jaxformer.errors import ConfigError
from jaxformer.pretrained.families.bart import block
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    Family,
    Setting,
    as_text,
    const_field,
    enum_field,
    field,
    tied_output,
    token_layers,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import Entry, entry, norm, rows_after


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of an OPT with its output layer or a classifier."""
    body, config = spec.body, spec.config
    entries = token_layers(spec, "model.decoder.embed_tokens.weight")
    table = "model.decoder.embed_positions.weight"
    entries += [entry(f"{body}decoder/positions/table", table, rows_after(2))]
    for i in range(config.num_decoder_layers):
        entries += block(f"{body}decoder/blocks_{i}", f"model.decoder.layers.{i}")
    if config.norm.placement == "pre":
        entries += norm(f"{body}decoder/final_norm", "model.decoder.final_layer_norm")
    return entries


def _read_projection(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for embeddings of another size than the model's."""
    size, width = hf.get("word_embed_proj_dim"), fields["d_model"]
    if size not in (None, width):
        raise ConfigError(
            f"word_embed_proj_dim={as_text(size)} is not supported: only hidden_size={width}"
        )
    return {}


_PROJECTION = Setting(
    ("word_embed_proj_dim",),
    _read_projection,
    lambda config: {"word_embed_proj_dim": config.d_model},
)
"""The size of embeddings; only `facebook/opt-350m` has another one than the model's."""

OPT = Family(
    model_type="opt",
    architectures={
        "OPTForCausalLM": "decoder",
        "OPTModel": "bare_decoder",
        "OPTForSequenceClassification": "decoder_classifier",
    },
    constants={
        "positions": Learned(),
        "norm.eps": 1e-5,
        "embeddings.scale": False,
        "initializer": "normal",
    },
    settings=(
        field("vocab_size", "vocab_size", 50_272),
        field("max_position_embeddings", "max_len", 2048),
        field("hidden_size", "d_model", 768),
        field("num_hidden_layers", "num_decoder_layers", 12),
        field("num_attention_heads", "num_heads", 12),
        field("ffn_dim", "d_ff", 3072),
        _PROJECTION,
        enum_field("activation_function", "feed_forward.activation", "relu", ACTIVATIONS),
        enum_field("do_layer_norm_before", "norm.placement", True, {True: "pre", False: "post"}),
        tied_output(True),
        field("dropout", "dropout_rate", 0.1),
        field("attention_dropout", "attention.dropout_rate", 0.0),
        const_field("enable_bias", True),
        const_field("layer_norm_elementwise_affine", True),
        const_field("_remove_final_layer_norm", False),
    ),
    weight_map=weight_map,
    prefix="model.",
    head_prefixes=("lm_head.", "score."),
    ignored_keys=frozenset(["layerdrop", "init_std"]),
    classifier_tensors=("score.weight",),
)
