"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, one matrix for query, key and value."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    Family,
    const_field,
    enum_field,
    field,
    tied_output,
    token_layers,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import FLAT, Entry, conv1d, dense, entry, norm


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a GPT-2 with its output layer or a classifier."""
    body, config = spec.body, spec.config
    entries = token_layers(spec, "transformer.wte.weight")
    entries += [entry(f"{body}decoder/positions/table", "transformer.wpe.weight")]
    for i in range(config.num_decoder_layers):
        entries += _block(f"{body}decoder/blocks_{i}", f"transformer.h.{i}")
    return [*entries, *norm(f"{body}decoder/final_norm", "transformer.ln_f")]


def _block(jax: str, hf: str) -> list[Entry]:
    parts = [f"{jax}/attention/{name}" for name in ("query", "key", "value")]
    kernels = tuple(f"{part}/kernel" for part in parts)
    biases = tuple(f"{part}/bias" for part in parts)
    return [
        *norm(f"{jax}/attention_norm", f"{hf}.ln_1"),
        Entry(kernels, (f"{hf}.attn.c_attn.weight",), conv1d()),
        Entry(biases, (f"{hf}.attn.c_attn.bias",), FLAT),
        *dense(f"{jax}/attention/out", f"{hf}.attn.c_proj", kernel=conv1d(inputs=2)),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.ln_2"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.mlp.c_fc", kernel=conv1d()),
        *dense(f"{jax}/feed_forward/down", f"{hf}.mlp.c_proj", kernel=conv1d()),
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
    weight_map=weight_map,
    prefix="transformer.",
    head_prefixes=("lm_head.", "score."),
    ignored_tensors=r"\.attn\.(masked_)?bias$",
    ignored_keys=frozenset(
        """n_ctx embd_pdrop reorder_and_upcast_attn summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj""".split()
    ),
    classifier_tensors=("score.weight",),
)
"""The dropout of embeddings (`embd_pdrop`) is `dropout_rate` here."""
