"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from collections.abc import Mapping
from typing import Any

from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Fixed, Named
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, attention, dense, norm, one


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a DistilBERT, with the head that fills in masked tokens or without."""
    ours, masked = subject.body, subject.kind == "masked"
    copies = ("vocab_projector.weight",) if masked else ()
    embeddings = "distilbert.embeddings"
    rows = [
        Row((f"{ours}embedding/table",), (f"{embeddings}.word_embeddings.weight", *copies)),
        one(f"{ours}encoder/positions/table", f"{embeddings}.position_embeddings.weight"),
        *norm(f"{ours}encoder/embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    for i in range(subject.config.num_encoder_layers):
        rows += _block(f"{ours}encoder/blocks_{i}", f"distilbert.transformer.layer.{i}")
    if masked:
        rows += dense("transform", "vocab_transform")
        rows += norm("transform_norm", "vocab_layer_norm")
        rows += [one("bias", "vocab_projector.bias")]
    return rows


def _block(ours: str, theirs: str) -> list[Row]:
    names = ("q_lin", "k_lin", "v_lin", "out_lin")
    return [
        *attention(f"{ours}/attention", f"{theirs}.attention", names),
        *norm(f"{ours}/attention_norm", f"{theirs}.sa_layer_norm"),
        *dense(f"{ours}/feed_forward/up", f"{theirs}.ffn.lin1"),
        *dense(f"{ours}/feed_forward/down", f"{theirs}.ffn.lin2"),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.output_layer_norm"),
    ]


FAMILY = Family(
    model_type="distilbert",
    architectures={"DistilBertModel": "encoder", "DistilBertForMaskedLM": "masked"},
    constants={
        "positions": "learned",
        "norm_eps": 1e-12,
        "scale_embeddings": False,
        "normalize_embeddings": True,
        "tied_embeddings": "output",
        "initializer": "normal",
    },
    settings=(
        Copied("vocab_size", "vocab_size", 30_522),
        Copied("max_position_embeddings", "max_len", 512),
        Copied("dim", "d_model", 768),
        Copied("n_layers", "num_encoder_layers", 6),
        Copied("n_heads", "num_heads", 12),
        Copied("hidden_dim", "d_ff", 3072),
        Named("activation", "activation", "gelu", ACTIVATIONS),
        Copied("dropout", "dropout_rate", 0.1),
        Copied("attention_dropout", "attention_dropout_rate", 0.1),
        Fixed("tie_word_embeddings", True),
    ),
    table=table,
    prefix="distilbert.",
    heads=("vocab_",),
    ignored=r"\.embeddings\.position_ids$",
    free=frozenset("sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_".split()),
)
"""Its classifier has a layer with relu where ours has BERT's with tanh, so it is not here."""
