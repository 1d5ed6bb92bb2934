"""GPT-NeoX (Black et al. 2022) and Pythia: rotary in a part of each head, parallel sub-layers."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Rotary
from jaxformer.pretrained.families.rotary import rotary
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
from jaxformer.pretrained.weight_map import FLAT, SAME, Entry, dense, linear, norm


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a GPT-NeoX with its output layer or a classifier."""
    body, config = spec.body, spec.config
    entries = token_layers(spec, "gpt_neox.embed_in.weight", "embed_out.weight")
    for i in range(config.num_decoder_layers):
        entries += _block(f"{body}decoder/blocks_{i}", f"gpt_neox.layers.{i}")
    return [*entries, *norm(f"{body}decoder/final_norm", "gpt_neox.final_layer_norm")]


def _block(jax: str, hf: str) -> list[Entry]:
    parts = [f"{jax}/attention/{name}" for name in ("query", "key", "value")]
    kernels = tuple(f"{part}/kernel" for part in parts)
    biases = tuple(f"{part}/bias" for part in parts)
    joined = f"{hf}.attention.query_key_value"  # of each head query, key and value
    return [
        *norm(f"{jax}/attention_norm", f"{hf}.input_layernorm"),
        Entry(kernels, (f"{joined}.weight",), SAME, linear()),
        Entry(biases, (f"{joined}.bias",), SAME, FLAT),
        *dense(f"{jax}/attention/out", f"{hf}.attention.dense", kernel=linear(inputs=2)),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.post_attention_layernorm"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.mlp.dense_h_to_4h"),
        *dense(f"{jax}/feed_forward/down", f"{hf}.mlp.dense_4h_to_h"),
    ]


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
    weight_map=weight_map,
    prefix="gpt_neox.",
    head_prefixes=("embed_out.", "score."),
    renamed_endings={"lm_head.weight": "embed_out.weight"},
    ignored_tensors=r"\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)$",
    ignored_keys=frozenset(["classifier_dropout"]),
    classifier_tensors=("score.weight",),
)
