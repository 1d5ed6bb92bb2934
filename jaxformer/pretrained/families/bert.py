"""BERT (Devlin et al. 2019): post-norm, learned positions, token types, heads of pretraining."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxformer.pretrained.family import Family
from jaxformer.pretrained.settings import ACTIVATIONS, Copied, Fixed, Named
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Row, attention, dense, norm, one

_NEXT_SENTENCE = "cls.seq_relationship"
_POOLER = "bert.pooler.dense"


def table(subject: Subject, theirs: Mapping[str, Any]) -> list[Row]:
    """The rows of a BERT with its pretraining heads, a classifier, or neither."""
    ours, config = subject.body, subject.config
    copies = ("cls.predictions.decoder.weight",) if subject.kind.startswith("masked") else ()
    embeddings = "bert.embeddings"
    rows = [
        Row((f"{ours}embedding/table",), (f"{embeddings}.word_embeddings.weight", *copies)),
        one(f"{ours}type_embedding/table", f"{embeddings}.token_type_embeddings.weight"),
        one(f"{ours}encoder/positions/table", f"{embeddings}.position_embeddings.weight"),
        *norm(f"{ours}encoder/embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    for i in range(config.num_encoder_layers):
        rows += _block(f"{ours}encoder/blocks_{i}", f"bert.encoder.layer.{i}")
    if config.pooler:
        rows += dense(f"{ours}pooler", _POOLER)
    return [*rows, *_head(subject)]


def _block(ours: str, theirs: str) -> list[Row]:
    names = ("self.query", "self.key", "self.value", "output.dense")
    return [
        *attention(f"{ours}/attention", f"{theirs}.attention", names),
        *norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *dense(f"{ours}/feed_forward/up", f"{theirs}.intermediate.dense"),
        *dense(f"{ours}/feed_forward/down", f"{theirs}.output.dense"),
        *norm(f"{ours}/feed_forward_norm", f"{theirs}.output.LayerNorm"),
    ]


def _head(subject: Subject) -> list[Row]:
    if subject.kind == "encoder_classifier":
        return dense("head", "classifier")
    if not subject.kind.startswith("masked"):
        return []
    head = "cls.predictions"
    rows = [
        *dense("transform", f"{head}.transform.dense"),
        *norm("transform_norm", f"{head}.transform.LayerNorm"),
        Row(("bias",), (f"{head}.bias", f"{head}.decoder.bias")),
    ]
    return [*rows, *dense("next_sentence", _NEXT_SENTENCE)] if subject.config.pooler else rows


def adapt(subject: Subject, names: Collection[str]) -> Subject:
    """`subject` with a pooler where the folder has one that the model's head uses.

    The published weights of a masked model come with the head of the next sentence too.
    """
    needed = {
        "encoder": f"{_POOLER}.weight" in names,
        "encoder_classifier": True,
        "masked": f"{_NEXT_SENTENCE}.weight" in names,
        "masked_and_next": True,
    }
    pooler = needed[subject.kind]
    kind = "masked_and_next" if pooler and subject.kind == "masked" else subject.kind
    return subject._replace(kind=kind, config=replace(subject.config, pooler=pooler))


FAMILY = Family(
    model_type="bert",
    architectures={
        "BertModel": "encoder",
        "BertForMaskedLM": "masked",
        "BertForPreTraining": "masked_and_next",
        "BertForSequenceClassification": "encoder_classifier",
    },
    constants={
        "positions": "learned",
        "scale_embeddings": False,
        "normalize_embeddings": True,
        "tied_embeddings": "output",
        "initializer": "normal",
    },
    settings=(
        Copied("vocab_size", "vocab_size", 30_522),
        Copied("max_position_embeddings", "max_len", 512),
        Copied("type_vocab_size", "num_token_types", 2, least=1),
        Copied("hidden_size", "d_model", 768),
        Copied("num_hidden_layers", "num_encoder_layers", 12),
        Copied("num_attention_heads", "num_heads", 12),
        Copied("intermediate_size", "d_ff", 3072),
        Named("hidden_act", "activation", "gelu", ACTIVATIONS),
        Copied("layer_norm_eps", "norm_eps", 1e-12),
        Copied("hidden_dropout_prob", "dropout_rate", 0.1),
        Copied("attention_probs_dropout_prob", "attention_dropout_rate", 0.1),
        Fixed("position_embedding_type", "absolute"),
        Fixed("is_decoder", False),
        Fixed("add_cross_attention", False),
        Fixed("tie_word_embeddings", True),
    ),
    table=table,
    prefix="bert.",
    heads=("cls.", "classifier."),
    adapt=adapt,
    renamed={".gamma": ".weight", ".beta": ".bias"},
    ignored=r"\.embeddings\.position_ids$",
    free=frozenset(
        """classifier_dropout directionality pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type""".split()
    ),
    head="classifier.weight",
)
"""A classifier's dropout (`classifier_dropout`) is that of sub-layers here."""
