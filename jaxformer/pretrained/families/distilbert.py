"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from collections.abc import Mapping
from typing import Any

from jaxformer.pretrained.config_mapping import ACTIVATIONS, ConstField, EnumField, Field
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import Entry, attention, dense, entry, norm


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a DistilBERT with or without the masked-language-model head."""
    body, masked = spec.body, spec.kind == "masked"
    copies = ("vocab_projector.weight",) if masked else ()
    embeddings = "distilbert.embeddings"
    entries = [
        Entry((f"{body}embedding/table",), (f"{embeddings}.word_embeddings.weight", *copies)),
        entry(f"{body}encoder/positions/table", f"{embeddings}.position_embeddings.weight"),
        *norm(f"{body}encoder/embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    for i in range(spec.config.num_encoder_layers):
        entries += _block(f"{body}encoder/blocks_{i}", f"distilbert.transformer.layer.{i}")
    if masked:
        entries += dense("transform", "vocab_transform")
        entries += norm("transform_norm", "vocab_layer_norm")
        entries += [entry("bias", "vocab_projector.bias")]
    return entries


def _block(jax: str, hf: str) -> list[Entry]:
    names = ("q_lin", "k_lin", "v_lin", "out_lin")
    return [
        *attention(f"{jax}/attention", f"{hf}.attention", names),
        *norm(f"{jax}/attention_norm", f"{hf}.sa_layer_norm"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.ffn.lin1"),
        *dense(f"{jax}/feed_forward/down", f"{hf}.ffn.lin2"),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.output_layer_norm"),
    ]


FAMILY = Family(
    model_type="distilbert",
    architectures={"DistilBertModel": "encoder", "DistilBertForMaskedLM": "masked"},
    constants={
        "positions": "learned",
        "norm_eps": 1e-12,
        "scale_embeddings": False,
        "embedding_norm": True,
        "tied_embeddings": "output",
        "initializer": "normal",
    },
    settings=(
        Field("vocab_size", "vocab_size", 30_522),
        Field("max_position_embeddings", "max_len", 512),
        Field("dim", "d_model", 768),
        Field("n_layers", "num_encoder_layers", 6),
        Field("n_heads", "num_heads", 12),
        Field("hidden_dim", "d_ff", 3072),
        EnumField("activation", "activation", "gelu", ACTIVATIONS),
        Field("dropout", "dropout_rate", 0.1),
        Field("attention_dropout", "attention_dropout_rate", 0.1),
        ConstField("tie_word_embeddings", True),
    ),
    weight_map=weight_map,
    prefix="distilbert.",
    head_prefixes=("vocab_",),
    ignored_tensors=r"\.embeddings\.position_ids$",
    ignored_keys=frozenset(
        "sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_".split()
    ),
)
"""Its classifier is not supported: it has a relu layer where `Classifier` has a tanh pooler."""
