"""Llama (Touvron et al. 2023) and its relatives: Mistral, Qwen2, Qwen3, Gemma, Gemma 2.

All have RMS norms, rotary positions, gated layers and shared key/value heads.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from jaxformer.config import Rotary, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained.families.rotary import rotary
from jaxformer.pretrained.family import (
    ACTIVATIONS,
    Family,
    Setting,
    as_text,
    const_field,
    enum_field,
    field,
    optional_field,
    parse_number,
    tied_output,
    token_layers,
    unsupported,
)
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import (
    SAME,
    Entry,
    Transform,
    dense,
    linear,
    norm,
    shifted,
    zero_entry,
)


def _biases(*keys: str) -> Setting:
    """Biases of attention and feed-forward layers; with one kind ours has both, the other zero."""

    def read(hf: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_bias": any([parse_number(key, hf.get(key, False), bool) for key in keys])}

    return Setting(keys, read, lambda config: dict.fromkeys(keys, config.use_bias))


_WINDOW = optional_field("sliding_window", "attention.window", 4096, least=1)
"""The number of tokens that a token attends to; null means all."""


def _read_full_attention(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for a layer with a window."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise unsupported("layer_types", kinds, ["full_attention"])
    if hf.get("use_sliding_window"):
        raise unsupported("use_sliding_window", hf["use_sliding_window"], False)
    return {}


_FULL_ATTENTION = Setting(
    ("layer_types", "use_sliding_window"),
    _read_full_attention,
    lambda _: {"use_sliding_window": False},
)
"""Layers of Qwen that may have a window; only those without one are supported."""


def _read_layer_types(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our field; `ConfigError` for windows that do not alternate regularly."""
    layers = fields["num_decoder_layers"]
    kinds = hf.get("layer_types") or _layer_types(layers, 2)
    for interval in (2, *range(3, layers + 1), None):
        if kinds == _layer_types(layers, interval):
            return {"attention.full_every": interval}
    raise ConfigError(
        f"layer_types={as_text(kinds)} is not supported: only sliding_attention with "
        "full_attention in each n-th layer"
    )


def _layer_types(layers: int, interval: int | None) -> list[str]:
    names = {False: "sliding_attention", True: "full_attention"}
    return [names[interval is not None and i % interval == 0] for i in range(1, layers + 1)]


_LAYER_TYPES = Setting(
    ("layer_types",),
    _read_layer_types,
    lambda config: {
        "layer_types": _layer_types(config.num_decoder_layers, config.attention.full_every)
    },
)
"""The layers that have a window."""

# Ours and their names of a block's norms, by the placement.
_NORMS = {
    "pre": {"attention_norm": "input", "feed_forward_norm": "post_attention"},
    "sandwich": {
        "attention_norm": "input",
        "attention_post_norm": "post_attention",
        "feed_forward_norm": "pre_feedforward",
        "feed_forward_post_norm": "post_feedforward",
    },
}


def _weight_map(scale: Transform, spec: ModelSpec, hf: Mapping[str, Any]) -> list[Entry]:
    """The entries of a decoder with its output layer or a classifier; `scale` is that of norms."""
    body, config = spec.body, spec.config
    entries = token_layers(spec, "model.embed_tokens.weight")
    for i in range(config.num_decoder_layers):
        jax, name = f"{body}decoder/blocks_{i}", f"model.layers.{i}"
        entries += _layers(jax, name, config, hf)
        for path, tensor in _NORMS.get(config.norm.placement, {}).items():
            entries += norm(f"{jax}/{path}", f"{name}.{tensor}_layernorm", False, scale=scale)
    return [*entries, *norm(f"{body}decoder/final_norm", "model.norm", False, scale=scale)]


def _layers(
    jax: str, hf: str, config: TransformerConfig, config_json: Mapping[str, Any]
) -> list[Entry]:
    """The entries of the dense layers of a block, and of the norms of queries and keys."""
    attention, feed_forward = (bool(config_json.get(x)) for x in ("attention_bias", "mlp_bias"))
    qkv = attention if config.attention.qkv_bias is None else config.qkv_bias
    biases = dict.fromkeys(("query", "key", "value"), qkv) | {"out": attention}
    entries = []
    for name, has_bias in biases.items():
        kernel = linear(inputs=2) if name == "out" else linear()
        path, tensor = f"{jax}/attention/{name}", f"{hf}.self_attn.{name[0]}_proj"
        entries += dense(path, tensor, has_bias, kernel=kernel)
        ours = config.use_bias if name == "out" else config.qkv_bias
        entries += [zero_entry(f"{path}/bias")] if ours and not has_bias else []
    for name in ("gate", "up", "down"):
        path = f"{jax}/feed_forward/{name}"
        entries += dense(path, f"{hf}.mlp.{name}_proj", feed_forward)
        entries += [zero_entry(f"{path}/bias")] if config.use_bias and not feed_forward else []
    for name in ("query", "key") if config.attention.query_key_norm else ():
        path, tensor = f"{jax}/attention/{name}_norm", f"{hf}.self_attn.{name[0]}_norm"
        entries += norm(path, tensor, bias=False)
    return entries


def _family(
    name: str,
    *settings: Setting,
    vocab_size: int,
    max_len: int,
    sizes: tuple[int, int, int, int, int | None] = (4096, 22_016, 32, 32, 32),
    tied: bool = False,
    activations: Mapping[str, str] = ACTIVATIONS,
    scale: Transform = SAME,
    activation_key: str = "hidden_act",
    ignored_keys: str = "",
    constants: Mapping[str, Any] = {},
) -> Family:
    """A family of classes `name`; the sizes are those of a config.json without them.

    `sizes` are those of the model and its feed-forward network, and the numbers of layers, heads
    and key/value heads.
    """
    d_model, d_ff, layers, heads, kv_heads = sizes
    return Family(
        model_type=name.lower(),
        architectures={
            f"{name}ForCausalLM": "decoder",
            f"{name}Model": "bare_decoder",
            f"{name}ForSequenceClassification": "decoder_classifier",
        },
        constants={
            "positions": Rotary(),
            "norm.kind": "rms",
            "norm.placement": "pre",
            "feed_forward.gated": True,
            "embeddings.scale": False,
            "initializer": "normal",
            **constants,
        },
        settings=(
            field("vocab_size", "vocab_size", vocab_size),
            field("max_position_embeddings", "max_len", max_len),
            field("hidden_size", "d_model", d_model),
            field("num_hidden_layers", "num_decoder_layers", layers),
            field("num_attention_heads", "num_heads", heads),
            optional_field(
                "num_key_value_heads",
                "attention.num_kv_heads",
                kv_heads,
                value_of=attrgetter("kv_heads"),
            ),
            field("intermediate_size", "d_ff", d_ff),
            enum_field(
                activation_key, "feed_forward.activation", next(iter(activations)), activations
            ),
            tied_output(tied),
            field("rms_norm_eps", "norm.eps", 1e-6),
            field("attention_dropout", "attention.dropout_rate", 0.0),
            rotary(),
            *settings,
        ),
        weight_map=partial(_weight_map, scale),
        prefix="model.",
        head_prefixes=("lm_head.", "score."),
        ignored_tensors=r"\.rotary_emb\.inv_freq$",
        ignored_keys=frozenset(ignored_keys.split()),
        classifier_tensors=("score.weight",),
    )


def _head_dim(default: int | None) -> Setting:
    return optional_field("head_dim", "head_dim", default, value_of=attrgetter("key_size"))


_CAUSAL = const_field("use_bidirectional_attention", False)
_SILU = {"silu": "silu", **ACTIVATIONS}
# The released config.json says "gelu", and means the approximation by tanh.
_TANH = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS, "gelu": "gelu_tanh"}

LLAMA = _family(
    "Llama",
    _head_dim(None),
    _biases("attention_bias", "mlp_bias"),
    vocab_size=32_000,
    max_len=2048,
    sizes=(4096, 11_008, 32, 32, None),
    activations=_SILU,
    ignored_keys="pretraining_tp",
)
MISTRAL = _family(
    "Mistral",
    _head_dim(None),
    _WINDOW,
    vocab_size=32_000,
    max_len=131_072,
    sizes=(4096, 14_336, 32, 32, 8),
    activations=_SILU,
    constants={"use_bias": False},
)
"""Jiang et al. 2023: a window over the last tokens."""
QWEN2 = _family(
    "Qwen2",
    _FULL_ATTENTION,
    vocab_size=151_936,
    max_len=32_768,
    activations=_SILU,
    ignored_keys="sliding_window max_window_layers",
    constants={"use_bias": False, "attention.qkv_bias": True},
)
"""Yang et al. 2024: biases of queries, keys and values."""
QWEN3 = _family(
    "Qwen3",
    _head_dim(128),
    _biases("attention_bias"),
    _FULL_ATTENTION,
    vocab_size=151_936,
    max_len=32_768,
    activations=_SILU,
    ignored_keys="sliding_window max_window_layers",
    constants={"attention.query_key_norm": True},
)
"""Yang et al. 2025: norms of queries and keys."""
GEMMA = _family(
    "Gemma",
    _head_dim(256),
    _CAUSAL,
    _biases("attention_bias"),
    vocab_size=256_000,
    max_len=8192,
    sizes=(3072, 24_576, 28, 16, 16),
    tied=True,
    activations=_TANH,
    scale=shifted(SAME, 1.0),
    ignored_keys="hidden_activation",
    constants={"embeddings.scale": True},
)
"""Gemma Team 2024: norms store their scale less one; embeddings are scaled."""
GEMMA2 = _family(
    "Gemma2",
    _head_dim(256),
    _CAUSAL,
    _biases("attention_bias"),
    _WINDOW,
    _LAYER_TYPES,
    field(
        "query_pre_attn_scalar",
        "attention.query_scalar",
        256,
        value_of=lambda config: config.attention.query_scalar or config.key_size,
    ),
    optional_field("attn_logit_softcapping", "attention.softcap", 50.0, kind=float),
    optional_field("final_logit_softcapping", "output.softcap", 30.0, kind=float),
    vocab_size=256_000,
    max_len=8192,
    sizes=(2304, 9216, 26, 8, 4),
    tied=True,
    activations={"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS},
    activation_key="hidden_activation",
    scale=shifted(SAME, 1.0),
    ignored_keys="hidden_act cache_implementation sliding_window_size",
    constants={"norm.placement": "sandwich", "embeddings.scale": True},
)
"""Gemma Team 2024b: norms on both sides of each sub-layer, a window in every other layer, soft caps
of the logits."""
