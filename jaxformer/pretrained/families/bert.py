"""BERT (Devlin et al. 2019): post-norm, learned positions, token types, heads of pretraining."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxformer.pretrained.config_mapping import ACTIVATIONS, ConstField, EnumField, Field
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import Entry, attention, dense, entry, norm

_NEXT_SENTENCE = "cls.seq_relationship"
_POOLER = "bert.pooler.dense"


def weight_map(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a BERT with its pretraining heads, a classifier, or neither."""
    body, config = spec.body, spec.config
    copies = ("cls.predictions.decoder.weight",) if spec.kind.startswith("masked") else ()
    embeddings = "bert.embeddings"
    entries = [
        Entry((f"{body}embedding/table",), (f"{embeddings}.word_embeddings.weight", *copies)),
        entry(f"{body}type_embedding/table", f"{embeddings}.token_type_embeddings.weight"),
        entry(f"{body}encoder/positions/table", f"{embeddings}.position_embeddings.weight"),
        *norm(f"{body}encoder/embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    for i in range(config.num_encoder_layers):
        entries += _block(f"{body}encoder/blocks_{i}", f"bert.encoder.layer.{i}")
    if config.pooler:
        entries += dense(f"{body}pooler", _POOLER)
    return [*entries, *_head(spec)]


def _block(jax: str, hf: str) -> list[Entry]:
    names = ("self.query", "self.key", "self.value", "output.dense")
    return [
        *attention(f"{jax}/attention", f"{hf}.attention", names),
        *norm(f"{jax}/attention_norm", f"{hf}.attention.output.LayerNorm"),
        *dense(f"{jax}/feed_forward/up", f"{hf}.intermediate.dense"),
        *dense(f"{jax}/feed_forward/down", f"{hf}.output.dense"),
        *norm(f"{jax}/feed_forward_norm", f"{hf}.output.LayerNorm"),
    ]


def _head(spec: ModelSpec) -> list[Entry]:
    if spec.kind == "encoder_classifier":
        return dense("head", "classifier")
    if not spec.kind.startswith("masked"):
        return []
    head = "cls.predictions"
    entries = [
        *dense("transform", f"{head}.transform.dense"),
        *norm("transform_norm", f"{head}.transform.LayerNorm"),
        Entry(("bias",), (f"{head}.bias", f"{head}.decoder.bias")),
    ]
    return [*entries, *dense("next_sentence", _NEXT_SENTENCE)] if spec.config.pooler else entries


def adapt(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` with a pooler if the folder has one that the model's head uses.

    Published weights of a masked model also have the head for the next sentence.
    """
    needed = {
        "encoder": f"{_POOLER}.weight" in names,
        "encoder_classifier": True,
        "masked": f"{_NEXT_SENTENCE}.weight" in names,
        "masked_and_next": True,
    }
    pooler = needed[spec.kind]
    kind = "masked_and_next" if pooler and spec.kind == "masked" else spec.kind
    return spec._replace(kind=kind, config=replace(spec.config, pooler=pooler))


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
        "embedding_norm": True,
        "tied_embeddings": "output",
        "initializer": "normal",
    },
    settings=(
        Field("vocab_size", "vocab_size", 30_522),
        Field("max_position_embeddings", "max_len", 512),
        Field("type_vocab_size", "num_token_types", 2, least=1),
        Field("hidden_size", "d_model", 768),
        Field("num_hidden_layers", "num_encoder_layers", 12),
        Field("num_attention_heads", "num_heads", 12),
        Field("intermediate_size", "d_ff", 3072),
        EnumField("hidden_act", "activation", "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm_eps", 1e-12),
        Field("hidden_dropout_prob", "dropout_rate", 0.1),
        Field("attention_probs_dropout_prob", "attention_dropout_rate", 0.1),
        ConstField("position_embedding_type", "absolute"),
        ConstField("is_decoder", False),
        ConstField("add_cross_attention", False),
        ConstField("tie_word_embeddings", True),
    ),
    weight_map=weight_map,
    prefix="bert.",
    head_prefixes=("cls.", "classifier."),
    adapt=adapt,
    renamed_endings={".gamma": ".weight", ".beta": ".bias"},
    ignored_tensors=r"\.embeddings\.position_ids$",
    ignored_keys=frozenset(
        """classifier_dropout directionality pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type""".split()
    ),
    classifier_tensor="classifier.weight",
)
"""The dropout of a classifier (`classifier_dropout`) is `dropout_rate` here."""
