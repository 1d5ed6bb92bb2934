"""Decoders without shared key/value heads: GPT-2, GPT-NeoX with Pythia, and OPT."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxformer.config import Learned, Rotary
from jaxformer.pretrained.families.bart import block as opt_block
from jaxformer.pretrained.families.rotary import rotary
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    Family,
    Setting,
    const_field,
    enum_field,
    field,
    tied_output,
    token_layers,
    unsupported,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import (
    FLAT,
    SAME,
    Entry,
    Transform,
    conv1d,
    dense,
    entry,
    linear,
    norm,
    rows_after,
)


class _Names(NamedTuple):
    """The names of tensors outside the blocks, and the entries of a block."""

    embedding: str
    blocks: str
    """The blocks, each followed by its number."""
    block: Callable[[str, str], list[Entry]]
    """Our path and their name of a block -> its entries."""
    final_norm: str
    positions: str = ""
    """The table of learned positions."""
    table: Transform = SAME
    """The change of form of that table."""
    output: str = "lm_head.weight"


def _weight_map(names: _Names, spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a decoder with its output layer or a classifier."""
    body, config = spec.body, spec.config
    entries = token_layers(spec, f"{names.embedding}.weight", names.output)
    if names.positions:
        path = f"{body}decoder/positions/table"
        entries += [entry(path, f"{names.positions}.weight", names.table)]
    for i in range(config.num_decoder_layers):
        entries += names.block(f"{body}decoder/blocks_{i}", f"{names.blocks}.{i}")
    if config.norm.placement != "post":
        entries += norm(f"{body}decoder/final_norm", names.final_norm)
    return entries


def _joined(jax: str, leaf: str) -> tuple[str, ...]:
    """The paths of query, key and value, which one tensor holds."""
    return tuple(f"{jax}/attention/{name}/{leaf}" for name in ("query", "key", "value"))


def _gpt2_block(jax: str, hf: str) -> list[Entry]:
    return [
        *norm(f"{jax}/attention_norm", f"{hf}.ln_1"),
        Entry(_joined(jax, "kernel"), (f"{hf}.attn.c_attn.weight",), conv1d()),
        Entry(_joined(jax, "bias"), (f"{hf}.attn.c_attn.bias",), FLAT),
        *dense(f"{jax}/attention/out", f"{hf}.attn.c_proj", kernel=conv1d(inputs=2)),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.ln_2"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.mlp.c_fc", kernel=conv1d()),
        *dense(f"{jax}/feed_forward/down", f"{hf}.mlp.c_proj", kernel=conv1d()),
    ]


def _neox_block(jax: str, hf: str) -> list[Entry]:
    joined = f"{hf}.attention.query_key_value"  # of each head query, key and value
    return [
        *norm(f"{jax}/attention_norm", f"{hf}.input_layernorm"),
        Entry(_joined(jax, "kernel"), (f"{joined}.weight",), SAME, linear()),
        Entry(_joined(jax, "bias"), (f"{joined}.bias",), SAME, FLAT),
        *dense(f"{jax}/attention/out", f"{hf}.attention.dense", kernel=linear(inputs=2)),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.post_attention_layernorm"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.mlp.dense_h_to_4h"),
        *dense(f"{jax}/feed_forward/down", f"{hf}.mlp.dense_4h_to_h"),
    ]


GPT2 = Family(
    model_type="gpt2",
    architectures={
        "GPT2LMHeadModel": "decoder",
        "GPT2Model": "bare_decoder",
        "GPT2ForSequenceClassification": "decoder_classifier",
    },
    constants={
        "positions": Learned(),
        "norm.placement": "pre",
        "embeddings.scale": False,
        "initializer": "scaled_normal",
    },
    settings=(
        field("vocab_size", "vocab_size", 50_257),
        field("n_positions", "max_len", 1024),
        field("n_embd", "d_model", 768),
        field("n_layer", "num_decoder_layers", 12),
        field("n_head", "num_heads", 12),
        field("n_inner", "d_ff", lambda fields: 4 * fields["d_model"]),
        enum_field("activation_function", "feed_forward.activation", "gelu_new", ACTIVATIONS),
        tied_output(True),
        field("layer_norm_epsilon", "norm.eps", 1e-5),
        field("resid_pdrop", "dropout_rate", 0.1),
        field("attn_pdrop", "attention.dropout_rate", 0.1),
        const_field("scale_attn_weights", True),
        const_field("scale_attn_by_inverse_layer_idx", False),
        const_field("add_cross_attention", False),
    ),
    weight_map=partial(
        _weight_map,
        _Names(
            embedding="transformer.wte",
            blocks="transformer.h",
            block=_gpt2_block,
            final_norm="transformer.ln_f",
            positions="transformer.wpe",
        ),
    ),
    prefix="transformer.",
    head_prefixes=("lm_head.", "score."),
    ignored_tensors=r"\.attn\.(masked_)?bias$",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    ignored_keys=frozenset(
        """n_ctx predict_special_tokens embd_pdrop reorder_and_upcast_attn summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""".split()
    ),
    classifier_tensors=("score.weight",),
)
"""Radford et al. 2019. The dropout of embeddings (`embd_pdrop`) is `dropout_rate` here."""
GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures={
        "GPTNeoXForCausalLM": "decoder",
        "GPTNeoXModel": "bare_decoder",
        "GPTNeoXForSequenceClassification": "decoder_classifier",
    },
    constants={
        "positions": Rotary(),
        "embeddings.scale": False,
        "initializer": "normal",
    },
    settings=(
        field("vocab_size", "vocab_size", 50_432),
        field("max_position_embeddings", "max_len", 2048),
        field("hidden_size", "d_model", 6144),
        field("num_hidden_layers", "num_decoder_layers", 44),
        field("num_attention_heads", "num_heads", 64),
        field("intermediate_size", "d_ff", 24_576),
        enum_field("hidden_act", "feed_forward.activation", "gelu", ACTIVATIONS),
        tied_output(False),
        enum_field(
            "use_parallel_residual", "norm.placement", True, {True: "parallel", False: "pre"}
        ),
        field("layer_norm_eps", "norm.eps", 1e-5),
        field("hidden_dropout", "dropout_rate", 0.0),
        field("attention_dropout", "attention.dropout_rate", 0.0),
        rotary("rotary_emb_base", "rotary_pct", 0.25),
        const_field("attention_bias", True),
        const_field("is_decoder", False),
    ),
    weight_map=partial(
        _weight_map,
        _Names(
            embedding="gpt_neox.embed_in",
            blocks="gpt_neox.layers",
            block=_neox_block,
            final_norm="gpt_neox.final_layer_norm",
            output="embed_out.weight",
        ),
    ),
    prefix="gpt_neox.",
    head_prefixes=("embed_out.", "score."),
    renamed_endings={"lm_head.weight": "embed_out.weight"},
    ignored_tensors=r"\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)$",
    ignored_keys=frozenset(["classifier_dropout"]),
    classifier_tensors=("score.weight",),
)
"""Black et al. 2022: rotary positions in a part of each head, parallel sub-layers."""


def _read_embedding_size(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for embeddings of another size than the model, those of opt-350m."""
    if hf.get(_EMBEDDING) not in (None, fields["d_model"]):
        raise unsupported(_EMBEDDING, hf[_EMBEDDING], fields["d_model"])
    return {}


_EMBEDDING = "word_embed_proj_dim"

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
        enum_field("activation_function", "feed_forward.activation", "relu", ACTIVATIONS),
        enum_field("do_layer_norm_before", "norm.placement", True, {True: "pre", False: "post"}),
        tied_output(True),
        field("dropout", "dropout_rate", 0.1),
        field("attention_dropout", "attention.dropout_rate", 0.0),
        const_field("enable_bias", True),
        const_field("layer_norm_elementwise_affine", True),
        const_field("_remove_final_layer_norm", False),
        Setting((_EMBEDDING,), _read_embedding_size, lambda config: {_EMBEDDING: config.d_model}),
    ),
    weight_map=partial(
        _weight_map,
        _Names(
            embedding="model.decoder.embed_tokens",
            blocks="model.decoder.layers",
            block=opt_block,
            final_norm="model.decoder.final_layer_norm",
            positions="model.decoder.embed_positions",
            table=rows_after(2),
        ),
    ),
    prefix="model.",
    head_prefixes=("lm_head.", "score."),
    ignored_keys=frozenset(["layerdrop", "init_std"]),
    classifier_tensors=("score.weight",),
)
"""Zhang et al. 2022: learned positions after two unused rows, relu."""
