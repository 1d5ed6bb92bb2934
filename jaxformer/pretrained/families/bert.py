"""BERT (Devlin et al. 2019) and its relatives: RoBERTa, XLM-R (Conneau et al. 2020), DistilBERT."""

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxformer.config import Learned, with_fields
from jaxformer.pretrained import config_keys
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import POOLERLESS, Kind, ModelSpec
from jaxformer.pretrained.weight_map import SAME, Entry, Transform, WeightMap


class _Names(NamedTuple):
    """The names of tensors that differ between the families."""

    prefix: str
    """The beginning of the names of the embeddings, the blocks and the pooler."""
    blocks: str
    """The blocks, each followed by its number."""
    parts: Mapping[str, str]
    """The layers of a block, by our paths in it."""
    transform: str
    """The dense layer of the head that predicts tokens."""
    transform_norm: str
    """The norm after it."""
    output: str
    """The layer that makes logits; its weight is the embedding's."""
    bias: str
    """The bias of the logits; copies may have the name of the layer."""
    pooler: str = ""
    """The pooler, where there is one."""
    pooler_activation: str = "tanh"
    """The activation of the pooler."""
    classifier_pooler: str = ""
    """The pooler of a classifier."""
    next_sentence: str = ""
    """The head for the next sentence."""
    classifier: str = ""
    """The output layer of a classifier of texts."""
    heads: Mapping[str, str] = {"token_classifier": "classifier", "spans": "qa_outputs"}
    """The output layers of the kinds of models with an output for each token."""
    positions: Transform = SAME
    """The change of form of the table of positions."""


def _weight_map(names: _Names, spec: ModelSpec, hf: Mapping[str, Any]) -> WeightMap:
    """The entries of an encoder with the heads of pretraining, of another task, or none."""
    body = spec.body
    config = spec.config
    is_masked = spec.kind.startswith("masked")
    embeddings = f"{names.prefix}embeddings"
    tables = [f"{embeddings}.word_embeddings.weight"]
    if is_masked:
        tables.append(f"{names.output}.weight")
    entries = [
        Entry((f"{body}embedding/table",), tuple(tables)),
        maps.entry(
            f"{body}encoder/positions/table",
            f"{embeddings}.position_embeddings.weight",
            names.positions,
        ),
        *maps.norm(f"{body}encoder/embedding_norm", f"{embeddings}.LayerNorm"),
    ]
    if config.embeddings.num_types:
        types = f"{embeddings}.token_type_embeddings.weight"
        entries += [maps.entry(f"{body}type_embedding/table", types)]
    for i in range(config.num_encoder_layers):
        path = f"{body}encoder/blocks_{i}"
        entries += maps.layers(path, f"{names.blocks}.{i}", names.parts)
    if config.pooler != "none" and spec.kind not in POOLERLESS:
        is_classifier = spec.kind == "encoder_classifier"
        pooler = names.classifier_pooler if is_classifier else names.pooler
        entries += maps.dense(f"{body}pooler", pooler)
    if is_masked:
        entries += maps.dense("transform", names.transform)
        entries += maps.norm("transform_norm", names.transform_norm)
        biases = dict.fromkeys((names.bias, f"{names.output}.bias"))  # may be one name
        entries.append(Entry(("bias",), tuple(biases)))
    if is_masked and config.pooler != "none":
        entries += maps.dense("next_sentence", names.next_sentence)
    heads = {"encoder_classifier": names.classifier, **names.heads}
    if spec.kind in heads:
        entries += maps.dense("head", heads[spec.kind])
    return entries


def _adapt(names: _Names, spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """`spec` with a pooler if the folder has one that the model's head uses.

    Published weights of a masked model also have the head for the next sentence.
    """
    needed = {
        "encoder": f"{names.pooler}.weight" in tensors,
        "encoder_classifier": True,
        "masked": f"{names.next_sentence}.weight" in tensors,
        "masked_and_next": True,
    }
    has_pooler = needed.get(spec.kind, False)
    kind = "masked_and_next" if has_pooler and spec.kind == "masked" else spec.kind
    pooler = names.pooler_activation if has_pooler else "none"
    return spec._replace(kind=kind, config=with_fields(spec.config, {"pooler": pooler}))


_KINDS: dict[str, Kind] = {
    "Model": "encoder",
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked_and_next",
    "ForSequenceClassification": "encoder_classifier",
    "ForTokenClassification": "token_classifier",
    "ForQuestionAnswering": "spans",
}


def _family(
    model_type: str,
    name: str,
    names: _Names,
    *more: config_keys.Key,
    heads: str,
    ignored_keys: str,
    constants: Mapping[str, Any] = {},
    classifiers: tuple[str, ...] = ("classifier.weight",),
    aliases: Mapping[str, str] = {},
) -> Family:
    """The family whose classes are `name` and an ending of `_KINDS`, such as BertForMaskedLM.

    `heads` are the first parts of the names of heads' tensors, separated by blanks.
    """
    pooler = names.pooler.removesuffix("dense")
    return Family(
        model_type=model_type,
        architectures={
            f"{name}{ending}": kind
            for ending, kind in _KINDS.items()
            if names.next_sentence or kind != "masked_and_next"
        },
        constants={
            "positions": Learned(),
            "embeddings.scale": False,
            "embeddings.norm": True,
            "embeddings.tied": "output",
            "initializer": "normal",
            **constants,
        },
        keys=(*more, config_keys.constant("tie_word_embeddings", True)),
        weight_map=partial(_weight_map, names),
        prefix=names.prefix,
        head_prefixes=(*heads.split(), "qa_outputs."),
        adapt=partial(_adapt, names),
        renamed_endings={".gamma": ".weight", ".beta": ".bias"},
        ignored_tensors=r"\.embeddings\.position_ids$",
        unused_tensors=dict.fromkeys(POOLERLESS, f"^{re.escape(pooler)}") if pooler else {},
        aliases=aliases,
        ignored_keys=frozenset(ignored_keys.split()),
        classifier_tensors=classifiers,
    )


_KEYS = (
    config_keys.number("hidden_size", "d_model", 768),
    config_keys.number("num_hidden_layers", "num_encoder_layers", 12),
    config_keys.number("num_attention_heads", "num_heads", 12),
    config_keys.number("intermediate_size", "d_ff", 3072),
    config_keys.number("type_vocab_size", "embeddings.num_types", 2, least=1),
    config_keys.number("layer_norm_eps", "norm.eps", 1e-12),
    config_keys.number("hidden_dropout_prob", "dropout_rate", 0.1),
    config_keys.number("attention_probs_dropout_prob", "attention.dropout_rate", 0.1),
    config_keys.constant("position_embedding_type", "absolute"),
    config_keys.constant("is_decoder", False),
    config_keys.constant("add_cross_attention", False),
)
_IGNORED_KEYS = """classifier_dropout directionality pooler_fc_size pooler_num_attention_heads
    pooler_num_fc_layers pooler_size_per_head pooler_type"""

_BERT = _Names(
    prefix="bert.",
    blocks="bert.encoder.layer",
    parts={
        "attention/query": "attention.self.query",
        "attention/key": "attention.self.key",
        "attention/value": "attention.self.value",
        "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    },
    transform="cls.predictions.transform.dense",
    transform_norm="cls.predictions.transform.LayerNorm",
    output="cls.predictions.decoder",
    bias="cls.predictions.bias",
    pooler="bert.pooler.dense",
    classifier_pooler="bert.pooler.dense",
    next_sentence="cls.seq_relationship",
    classifier="classifier",
)

BERT = _family(
    "bert",
    "Bert",
    _BERT,
    config_keys.number("vocab_size", "vocab_size", 30_522),
    config_keys.number("max_position_embeddings", "max_len", 512),
    config_keys.choice("hidden_act", "feed_forward.activation", "gelu", config_keys.ACTIVATIONS),
    *_KEYS,
    heads="cls. classifier.",
    ignored_keys=_IGNORED_KEYS,
)
"""The dropout of a classifier (`classifier_dropout`) is `dropout_rate` here."""


def _read_positions(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """{"max_len": length} of the longest text; `ConfigError` for another padding id than 1."""
    if hf.get("pad_token_id", 1) != 1:
        raise config_keys.unsupported("pad_token_id", hf["pad_token_id"], 1)
    rows = config_keys.parse_number(
        "max_position_embeddings", hf.get(_POSITIONS.names[0], 512), int, 3
    )
    return {"max_len": rows - 2}


_POSITIONS = config_keys.Key(
    ("max_position_embeddings", "pad_token_id"),
    _read_positions,
    lambda config: {"max_position_embeddings": config.max_len + 2, "pad_token_id": 1},
)
"""The longest text and the padding id, which is 1: RoBERTa counts positions from id 1 + 1."""


_ROBERTA = _BERT._replace(
    prefix="roberta.",
    blocks="roberta.encoder.layer",
    transform="lm_head.dense",
    transform_norm="lm_head.layer_norm",
    output="lm_head.decoder",
    bias="lm_head.bias",
    pooler="roberta.pooler.dense",
    classifier_pooler="classifier.dense",
    next_sentence="",
    classifier="classifier.out_proj",
    positions=maps.rows_after(2),
)


def _roberta(model_type: str, name: str, vocab_size: int) -> Family:
    """A family of classes `name`."""
    return _family(
        model_type,
        name,
        _ROBERTA,
        config_keys.number("vocab_size", "vocab_size", vocab_size),
        _POSITIONS,
        # The token head always uses gelu.
        config_keys.choice("hidden_act", "feed_forward.activation", "gelu", {"gelu": "gelu"}),
        *_KEYS,
        heads="lm_head. classifier.",
        ignored_keys=_IGNORED_KEYS,
        classifiers=("classifier.out_proj.weight", "classifier.weight"),
    )


ROBERTA = _roberta("roberta", "Roberta", 50_265)
"""Liu et al. 2019."""
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta", 30_522)
"""Conneau et al. 2020: RoBERTa of a hundred languages."""

_DISTILBERT = _Names(
    prefix="distilbert.",
    blocks="distilbert.transformer.layer",
    parts={
        "attention/query": "attention.q_lin",
        "attention/key": "attention.k_lin",
        "attention/value": "attention.v_lin",
        "attention/out": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "feed_forward/up": "ffn.lin1",
        "feed_forward/down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    },
    transform="vocab_transform",
    transform_norm="vocab_layer_norm",
    output="vocab_projector",
    bias="vocab_projector.bias",
    pooler_activation="relu",
    classifier_pooler="pre_classifier",
    classifier="classifier",
)

DISTILBERT = _family(
    "distilbert",
    "DistilBert",
    _DISTILBERT,
    config_keys.number("vocab_size", "vocab_size", 30_522),
    config_keys.number("max_position_embeddings", "max_len", 512),
    config_keys.number("dim", "d_model", 768),
    config_keys.number("n_layers", "num_encoder_layers", 6),
    config_keys.number("n_heads", "num_heads", 12),
    config_keys.number("hidden_dim", "d_ff", 3072),
    config_keys.choice("activation", "feed_forward.activation", "gelu", config_keys.ACTIVATIONS),
    config_keys.number("dropout", "dropout_rate", 0.1),
    config_keys.number("attention_dropout", "attention.dropout_rate", 0.1),
    heads="vocab_ pre_classifier. classifier.",
    ignored_keys="sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_",
    constants={"norm.eps": 1e-12},
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
)
"""Sanh et al. 2019. The dropouts of its heads are `dropout_rate` here; the layer before its
classifier has a relu."""
