"""BART (Lewis et al. 2020), mBART, M2M100 and Marian (Junczys-Dowmunt et al. 2018)."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned, Sinusoidal, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained import config_keys
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import Entry, Transform

_OUTPUT = "lm_head.weight"
_SHARED = "model.shared.weight"
_SOURCE = "model.encoder.embed_tokens.weight"
_TARGET = "model.decoder.embed_tokens.weight"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}

_ONE_ROW = Transform(shape=lambda shape: (1, *shape), to_hf=lambda array: array[None])


def weight_map(spec: ModelSpec, config_json: Mapping[str, Any]) -> list[Entry]:
    """The entries of an encoder-decoder.

    BART and mBART have learned positions and norms of embeddings, mBART and M2M100 the last norms.
    """
    config = spec.config
    entries = []
    if config.output.bias:
        entries += [maps.entry("output/bias", "final_logits_bias", _ONE_ROW)]
    if config.embeddings.tied == "all":
        entries += [Entry(("embedding/table",), (_SHARED, _SOURCE, _TARGET, _OUTPUT))]
    else:
        output = (_OUTPUT,) if config.ties_output else ()
        entries += [Entry(("embedding/table",), (_TARGET, *output))]
        entries += [maps.entry("source_embedding/table", _SOURCE)]
        if not output:
            entries += [maps.entry("output/kernel", _OUTPUT, maps.linear())]
    for stack, layers in (
        ("encoder", config.num_encoder_layers),
        ("decoder", config.num_decoder_layers),
    ):
        if isinstance(config.positions, Learned):
            table = f"model.{stack}.embed_positions.weight"
            entries += [maps.entry(f"{stack}/positions/table", table, maps.rows_after(2))]
        if config.embeddings.norm:
            entries += maps.norm(f"{stack}/embedding_norm", f"model.{stack}.layernorm_embedding")
        if config.norm.placement == "pre":
            entries += maps.norm(f"{stack}/final_norm", f"model.{stack}.layer_norm")
        for i in range(layers):
            hf = f"model.{stack}.layers.{i}"
            entries += block(f"{stack}/blocks_{i}", hf, cross=stack == "decoder")
    return entries


def block(path: str, hf: str, cross: bool = False) -> list[Entry]:
    """The entries of a block, with cross-attention if `cross`."""
    names = {
        "feed_forward/up": "fc1",
        "feed_forward/down": "fc2",
        "feed_forward_norm": "final_layer_norm",
    }
    parts = {"attention": "self_attn"}
    if cross:
        parts["cross_attention"] = "encoder_attn"
    for part, name in parts.items():
        names |= {f"{part}/{ours}": f"{name}.{theirs}" for ours, theirs in _PROJECTIONS.items()}
        names[f"{part}_norm"] = f"{name}_layer_norm"
    return maps.layers(path, hf, names)


def _shared_number(key: str, field: str, default: int) -> config_keys.Key:
    """A number that encoder and decoder have each, and that must be one."""
    names = (f"encoder_{key}", f"decoder_{key}")

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        encoder, decoder = (
            config_keys.parse_number(name, config_json.get(name, default), int) for name in names
        )
        if encoder != decoder:
            raise ConfigError(
                f"{names[0]}={encoder} and {names[1]}={decoder} differ, which is not supported"
            )
        return {field: decoder}

    return config_keys.Key(names, read, lambda config: dict.fromkeys(names, getattr(config, field)))


_SHARED_KEY, _TIED_KEY = "share_encoder_decoder_embeddings", "tie_word_embeddings"


def _read_vocabularies(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields; `ConfigError` for shared embeddings of two vocabularies."""
    source = config_keys.parse_number("vocab_size", hf.get("vocab_size", 58_101), int)
    target = config_keys.parse_number(
        "decoder_vocab_size", hf.get("decoder_vocab_size") or source, int
    )
    shared = config_keys.parse_number(_SHARED_KEY, hf.get(_SHARED_KEY, True), bool)
    tied = config_keys.parse_number(_TIED_KEY, hf.get(_TIED_KEY, True), bool)
    if not shared:
        sizes = {"vocab_size": target, "source_vocab_size": source}
        return sizes | {"embeddings.tied": "output" if tied else "none"}
    if source != target or not tied:
        raise ConfigError(
            f"share_encoder_decoder_embeddings=true with vocab_size={source}, "
            f"decoder_vocab_size={target} and tie_word_embeddings={str(tied).lower()} are not "
            "supported: shared embeddings need one vocabulary and a tied output"
        )
    return {"vocab_size": source, "embeddings.tied": "all"}


def _write_vocabularies(config: TransformerConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        _SHARED_KEY: config.ties_inputs,
        _TIED_KEY: config.ties_output,
    }


_VOCABULARIES = config_keys.Key(
    ("vocab_size", "decoder_vocab_size", _SHARED_KEY, _TIED_KEY),
    _read_vocabularies,
    _write_vocabularies,
)
"""One vocabulary with one embedding for all, or two with the output tied or not."""


_KEYS = (
    config_keys.number("max_position_embeddings", "max_len", 1024),
    config_keys.number("d_model", "d_model", 1024),
    config_keys.number("encoder_layers", "num_encoder_layers", 12),
    config_keys.number("decoder_layers", "num_decoder_layers", 12),
    _shared_number("attention_heads", "num_heads", 16),
    _shared_number("ffn_dim", "d_ff", 4096),
    config_keys.choice(
        "activation_function", "feed_forward.activation", "gelu", config_keys.ACTIVATIONS
    ),
    config_keys.number("scale_embedding", "embeddings.scale", False),
    config_keys.number("dropout", "dropout_rate", 0.1),
    config_keys.number("attention_dropout", "attention.dropout_rate", 0.0),
    config_keys.number("activation_dropout", "feed_forward.dropout_rate", 0.0),
    config_keys.constant("is_decoder", False),
)

_IGNORED_KEYS = frozenset(
    """init_std encoder_layerdrop decoder_layerdrop classif_dropout
    classifier_dropout extra_pos_embeddings _num_labels add_bias_logits add_final_layer_norm
    normalize_before normalize_embedding static_position_embeddings""".split()
)
"""Each family has its norms and positions whatever the keys of early versions say."""

# The table of sines, which early versions stored.
_SINES = r"^model\.(en|de)coder\.embed_positions\.weights?$"


def _family(
    model_type: str, architecture: str, *more: config_keys.Key, constants: Mapping[str, Any]
) -> Family:
    """A family with one class of models."""
    sinusoidal = isinstance(constants["positions"], Sinusoidal)
    return Family(
        model_type=model_type,
        architectures={architecture: "encoder_decoder"},
        constants={"norm.eps": 1e-5, **constants},
        keys=(*more, *_KEYS),
        weight_map=weight_map,
        prefix="model.",
        head_prefixes=("lm_head.", "final_logits_bias"),
        ignored_tensors=_SINES if sinusoidal else r"(?!)",
        aliases={
            "num_attention_heads": "encoder_attention_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
        },
        ignored_keys=_IGNORED_KEYS,
    )


MARIAN = _family(
    "marian",
    "MarianMTModel",
    _VOCABULARIES,
    constants={"positions": Sinusoidal("halves"), "output.bias": True},
)
"""Positions end at `max_position_embeddings` there; sinusoidal positions here do not end."""

_BART = {
    "positions": Learned(),
    "embeddings.norm": True,
    "output.bias": True,
    "embeddings.tied": "all",
    "initializer": "normal",
}
_TIED = config_keys.constant("tie_word_embeddings", True)

BART = _family(
    "bart",
    "BartForConditionalGeneration",
    config_keys.number("vocab_size", "vocab_size", 50_265),
    _TIED,
    constants=_BART,
)
MBART = _family(
    "mbart",
    "MBartForConditionalGeneration",
    config_keys.number("vocab_size", "vocab_size", 50_265),
    _TIED,
    constants={**_BART, "norm.placement": "pre"},
)
"""Liu et al. 2020: BART of many languages, pre-norm."""

M2M100 = _family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    config_keys.number("vocab_size", "vocab_size", 128_112),
    _TIED,
    config_keys.constant("pad_token_id", 1),
    constants={
        "positions": Sinusoidal("halves", endpoint=True, offset=2),
        "norm.placement": "pre",
        "embeddings.tied": "all",
        "initializer": "normal",
    },
)
"""Fan et al. 2021, and NLLB (Costa-jussà et al. 2022); positions count from the padding id + 1."""
