"""Llama (Touvron et al. 2023) and its relatives: Mistral, Mixtral, Qwen2, Qwen3, OLMo 2, Gemma.

All have RMS norms, rotary positions, gated layers and shared key/value heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from jaxformer.config import ExpertOptions, Rotary, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained import config_keys
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.families.decoder import Names, decoder
from jaxformer.pretrained.families.rotary import rotary, rotary_by_layer
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.weight_map import SAME, Entry, Transform


def _biases(*names: str) -> config_keys.Key:
    """Biases of attention and feed-forward layers; with one kind ours has both, the other zero."""

    def read(hf: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        values = [config_keys.parse_number(name, hf.get(name, False), bool) for name in names]
        return {"use_bias": any(values)}

    return config_keys.Key(names, read, lambda config: dict.fromkeys(names, config.use_bias))


_WINDOW = config_keys.number("sliding_window", "window.size", 4096, least=1, nullable=True)
"""The number of tokens that a token attends to; null means all."""
_WINDOW_OR_NONE = config_keys.number(
    "sliding_window", "window.size", None, kind=int, least=1, nullable=True
)
"""The same, where an absent key means all."""
_WINDOW_OF_SOME_LAYERS = config_keys.number(
    "sliding_window",
    "window.size",
    4096,
    least=1,
    nullable=True,
    value_of=lambda config: config.window.size or config.max_len,
)
"""The same where some layers have it: transformers needs a number even if none has a window."""


def _read_full_attention(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for a layer with a window."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise config_keys.unsupported("layer_types", kinds, ["full_attention"])
    if hf.get("use_sliding_window"):
        raise config_keys.unsupported("use_sliding_window", hf["use_sliding_window"], False)
    return {}


_FULL_ATTENTION = config_keys.Key(
    ("layer_types", "use_sliding_window"),
    _read_full_attention,
    lambda _: {"use_sliding_window": False},
)
"""Layers of Qwen that may have a window; only those without one are supported."""


def _read_layer_types(
    interval: int, key: str, hf: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Our fields; `ConfigError` for windows that do not alternate regularly."""
    layers = fields["num_decoder_layers"]
    interval = config_keys.parse_number(key, hf.get(key, interval), int, 1)
    kinds = hf.get("layer_types") or _layer_types(layers, interval)
    if kinds == _layer_types(layers, 1):
        return {"window.size": None}
    for every in (*range(2, max(layers, 2) + 1), None):
        if kinds == _layer_types(layers, every):
            return {"window.full_every": every}
    raise ConfigError(
        f"layer_types={config_keys.as_text(kinds)} is not supported: only sliding_attention with "
        "full_attention in each n-th layer"
    )


def _layer_types(layers: int, interval: int | None) -> list[str]:
    """The kinds of layers of which each `interval`-th has no window; None: all have one."""
    kinds = ["sliding_attention"] * layers
    if interval is not None:
        for number in range(interval, layers + 1, interval):
            kinds[number - 1] = "full_attention"
    return kinds


def _windows(interval: int, key: str = "") -> config_keys.Key:
    """The layers that have a window: all but each n-th, by default n = `interval`.

    `key` is the key of n in older versions.
    """

    def write(config: TransformerConfig) -> dict[str, Any]:
        every = 1 if config.window.size is None else config.window.full_every
        return {"layer_types": _layer_types(config.num_decoder_layers, every)}

    return config_keys.Key(("layer_types", key), partial(_read_layer_types, interval, key), write)


def _query_scalar(config: TransformerConfig) -> int | float:
    """The number that queries are divided by the root of: an integer, as in published folders."""
    scalar = config.attention.query_scalar or config.key_size
    return int(scalar) if scalar == int(scalar) else scalar


_QUERY_SCALAR = config_keys.number(
    "query_pre_attn_scalar", "attention.query_scalar", 256, value_of=_query_scalar
)
_ROTARY = rotary()
_MLP = ("gate", "up", "down")
# Ours and their names of a block's norms, by the placement.
_NORMS = {
    "pre": {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    },
    "output": {
        "attention_norm": "post_attention_layernorm",
        "feed_forward_norm": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    },
}


FeedForwardEntries = Callable[[str, str, TransformerConfig, Mapping[str, Any]], list[Entry]]
"""Our path and their name of a block, our config and config.json -> its feed-forward network."""


def _dense_entries(
    path: str, hf: str, names: Mapping[str, str], has_bias: bool, may_have: bool
) -> list[Entry]:
    """The entries of dense layers; without a bias in the folder, one that ours `may_have` is 0."""
    entries = maps.layers(path, hf, names, bias=has_bias)
    if may_have and not has_bias:
        entries += [maps.zero_entry(f"{path}/{ours}/bias") for ours in names]
    return entries


def _feed_forward(
    path: str, hf: str, config: TransformerConfig, config_json: Mapping[str, Any]
) -> list[Entry]:
    """The entries of one network for all tokens."""
    names = {f"feed_forward/{name}": f"mlp.{name}_proj" for name in _MLP}
    return _dense_entries(path, hf, names, bool(config_json.get("mlp_bias")), config.use_bias)


def _experts(
    module: str,
    names: tuple[str, str, str],
    path: str,
    hf: str,
    config: TransformerConfig,
    config_json: Mapping[str, Any],
) -> list[Entry]:
    """The entries of experts in `module` of a block; `names` are in the order of `_MLP`."""
    experts = config.feed_forward.experts
    assert experts is not None  # the keys of these families give it
    router = f"{path}/feed_forward/router/kernel"
    entries = [maps.entry(router, f"{hf}.{module}.gate.weight", maps.linear())]
    for ours, theirs in zip(_MLP, names, strict=True):
        stored = [f"{hf}.{module}.experts.{i}.{theirs}.weight" for i in range(experts.num_experts)]
        entries += maps.stacked(f"{path}/feed_forward/{ours}/kernel", stored, maps.linear())
        if config.use_bias:
            entries += [maps.zero_entry(f"{path}/feed_forward/{ours}/bias")]
    return entries


def _block(
    scale: Transform,
    feed_forward: FeedForwardEntries,
    path: str,
    hf: str,
    config: TransformerConfig,
    config_json: Mapping[str, Any],
) -> list[Entry]:
    """The entries of a block; `scale` is the change of form of its norms' scales."""
    attention = bool(config_json.get("attention_bias"))
    qkv = attention if config.attention.qkv_bias is None else config.qkv_bias
    projections = {
        "attention/query": "self_attn.q_proj",
        "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj",
    }
    entries = _dense_entries(path, hf, projections, qkv, config.qkv_bias)
    out = {"attention/out": "self_attn.o_proj"}
    entries += _dense_entries(path, hf, out, attention, config.use_bias)
    entries += feed_forward(path, hf, config, config_json)
    entries += maps.layers(path, hf, _NORMS.get(config.norm.placement, {}), bias=False, scale=scale)
    if config.attention.query_key_norm:
        norms = {
            "attention/query_norm": "self_attn.q_norm",
            "attention/key_norm": "self_attn.k_norm",
        }
        entries += maps.layers(path, hf, norms, bias=False, scale=scale)
    return entries


class _Sizes(NamedTuple):
    """The sizes that stand for the ones that a config.json lacks."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int | None


def _family(
    name: str,
    *more: config_keys.Key,
    vocab_size: int,
    max_len: int,
    sizes: _Sizes,
    model_type: str = "",
    aliases: Mapping[str, str] = {},
    tied: bool = False,
    activations: Mapping[str, str] = config_keys.ACTIVATIONS,
    scale: Transform = SAME,
    feed_forward: FeedForwardEntries = _feed_forward,
    size_key: str = "intermediate_size",
    eps: float = 1e-6,
    activation_key: str = "hidden_act",
    ignored_keys: str = "",
    constants: Mapping[str, Any] = {},
    positions: config_keys.Key = _ROTARY,
) -> Family:
    """A family of classes `name`; its model_type is the name in lower case if none is given.

    `vocab_size`, `max_len`, `sizes`, `tied`, `eps` and the first of `activations` stand for what a
    config.json lacks. `more` are the keys that not all of these families have.
    """
    return decoder(
        model_type or name.lower(),
        name,
        Names(
            embedding="model.embed_tokens",
            blocks="model.layers",
            block=partial(_block, scale, feed_forward),
            final_norm="model.norm",
            norm={"bias": False, "scale": scale},
        ),
        [
            config_keys.number("vocab_size", "vocab_size", vocab_size),
            config_keys.number("max_position_embeddings", "max_len", max_len),
            config_keys.number("hidden_size", "d_model", sizes.d_model),
            config_keys.number("num_hidden_layers", "num_decoder_layers", sizes.layers),
            config_keys.number("num_attention_heads", "num_heads", sizes.heads),
            config_keys.number(
                "num_key_value_heads",
                "attention.num_kv_heads",
                sizes.kv_heads,
                nullable=True,
                value_of=attrgetter("kv_heads"),
            ),
            config_keys.number(size_key, "d_ff", sizes.d_ff),
            config_keys.choice(
                activation_key, "feed_forward.activation", next(iter(activations)), activations
            ),
            config_keys.tied_output(tied),
            config_keys.number("rms_norm_eps", "norm.eps", eps),
            config_keys.number("attention_dropout", "attention.dropout_rate", 0.0),
            *more,
            positions,
        ],
        constants={
            "positions": Rotary(),
            "norm.kind": "rms",
            "norm.placement": "pre",
            "feed_forward.gated": True,
            **constants,
        },
        ignored_tensors=r"\.rotary_emb\.inv_freq$",
        aliases=aliases,
        ignored_keys=frozenset(ignored_keys.split()),
    )


def _head_dim(default: int | None) -> config_keys.Key:
    return config_keys.number(
        "head_dim", "head_dim", default, nullable=True, value_of=attrgetter("key_size")
    )


def _expert_options(
    count_key: str, count: int, top_k: int, normalize_key: str = "", normalize: bool = True
) -> config_keys.Key:
    """The experts: their number in `count_key`, and of each token; the numbers are the defaults.

    `normalize_key` says whether the weights of a token's experts add up to 1. Without such a key
    they do as `normalize` says.
    """
    top_k_key = "num_experts_per_tok"
    keys = [count_key, top_k_key]
    if normalize_key:
        keys.append(normalize_key)

    def read(hf: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        experts = ExpertOptions(
            num_experts=config_keys.parse_number(count_key, hf.get(count_key, count), int, 1),
            top_k=config_keys.parse_number(top_k_key, hf.get(top_k_key, top_k), int, 1),
            normalize=normalize,
        )
        if normalize_key in hf:
            value = config_keys.parse_number(normalize_key, hf[normalize_key], bool)
            experts = replace(experts, normalize=value)
        return {"feed_forward.experts": experts}

    def write(config: TransformerConfig) -> dict[str, Any]:
        experts = config.feed_forward.experts
        if experts is None:
            raise ConfigError("feed_forward.experts=None, but it has experts")
        content: dict[str, Any] = {count_key: experts.num_experts, top_k_key: experts.top_k}
        if normalize_key:
            content[normalize_key] = experts.normalize
        return content

    return config_keys.Key(tuple(keys), read, write)


def _read_all_sparse(hf: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for a layer without experts."""
    if hf.get("mlp_only_layers"):
        raise config_keys.unsupported("mlp_only_layers", hf["mlp_only_layers"], [])
    if hf.get("decoder_sparse_step", 1) != 1:
        raise config_keys.unsupported("decoder_sparse_step", hf["decoder_sparse_step"], 1)
    return {}


_ALL_SPARSE = config_keys.Key(
    ("mlp_only_layers", "decoder_sparse_step"),
    _read_all_sparse,
    lambda _: {"mlp_only_layers": [], "decoder_sparse_step": 1},
)
"""Layers of Qwen3-MoE that may have one network for all tokens; only experts are supported."""

_CAUSAL = config_keys.constant("use_bidirectional_attention", False)
_SILU = {"silu": "silu", **config_keys.ACTIVATIONS}
# The released config.json says "gelu", and means the approximation by tanh.
_TANH = {"gelu_pytorch_tanh": "gelu_tanh", **config_keys.ACTIVATIONS, "gelu": "gelu_tanh"}

LLAMA = _family(
    "Llama",
    _head_dim(None),
    _biases("attention_bias", "mlp_bias"),
    vocab_size=32_000,
    max_len=2048,
    sizes=_Sizes(d_model=4096, d_ff=11_008, layers=32, heads=32, kv_heads=None),
    activations=_SILU,
    ignored_keys="pretraining_tp",
)
MISTRAL = _family(
    "Mistral",
    _head_dim(None),
    _WINDOW,
    vocab_size=32_000,
    max_len=131_072,
    sizes=_Sizes(d_model=4096, d_ff=14_336, layers=32, heads=32, kv_heads=8),
    activations=_SILU,
    constants={"use_bias": False},
)
"""Jiang et al. 2023: a window over the last tokens."""
MIXTRAL = _family(
    "Mixtral",
    _head_dim(None),
    _WINDOW_OR_NONE,
    _expert_options("num_local_experts", 8, 2),
    config_keys.constant("router_jitter_noise", 0.0),
    vocab_size=32_000,
    max_len=131_072,
    sizes=_Sizes(d_model=4096, d_ff=14_336, layers=32, heads=32, kv_heads=8),
    eps=1e-5,
    activations=_SILU,
    feed_forward=partial(_experts, "block_sparse_moe", ("w1", "w3", "w2")),
    ignored_keys="output_router_logits router_aux_loss_coef",
    constants={"use_bias": False},
    positions=rotary(default_base=1e6),
    aliases={"num_experts": "num_local_experts"},
)
"""Jiang et al. 2024: two of eight experts for each token."""
_QWEN_SIZES = _Sizes(d_model=4096, d_ff=22_016, layers=32, heads=32, kv_heads=32)
QWEN2 = _family(
    "Qwen2",
    _FULL_ATTENTION,
    vocab_size=151_936,
    max_len=32_768,
    sizes=_QWEN_SIZES,
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
    sizes=_QWEN_SIZES,
    activations=_SILU,
    ignored_keys="sliding_window max_window_layers",
    constants={"attention.query_key_norm": True},
)
"""Yang et al. 2025: norms of queries and keys."""
QWEN3_MOE = _family(
    "Qwen3Moe",
    _head_dim(None),
    _biases("attention_bias"),
    _FULL_ATTENTION,
    _expert_options("num_experts", 128, 8, "norm_topk_prob", False),
    _ALL_SPARSE,
    vocab_size=151_936,
    max_len=32_768,
    sizes=_Sizes(d_model=2048, d_ff=768, layers=24, heads=32, kv_heads=4),
    activations=_SILU,
    feed_forward=partial(_experts, "mlp", ("gate_proj", "up_proj", "down_proj")),
    size_key="moe_intermediate_size",
    model_type="qwen3_moe",
    aliases={"num_local_experts": "num_experts"},
    ignored_keys="""sliding_window max_window_layers intermediate_size output_router_logits
        router_aux_loss_coef""",
    constants={"attention.query_key_norm": True},
)
"""Yang et al. 2025: many small experts, and norms of queries and keys."""
OLMO2 = _family(
    "Olmo2",
    _biases("attention_bias"),
    vocab_size=50_304,
    max_len=2048,
    sizes=_Sizes(d_model=4096, d_ff=11_008, layers=32, heads=32, kv_heads=None),
    activations=_SILU,
    constants={
        "norm.placement": "output",
        "attention.query_key_norm": True,
        "attention.norm_over_heads": True,
    },
)
"""OLMo Team 2024: norms of each sub-layer's output, and of all heads' queries and keys at once."""
GEMMA = _family(
    "Gemma",
    _head_dim(256),
    _CAUSAL,
    _biases("attention_bias"),
    vocab_size=256_000,
    max_len=8192,
    sizes=_Sizes(d_model=3072, d_ff=24_576, layers=28, heads=16, kv_heads=16),
    tied=True,
    activations=_TANH,
    scale=maps.shifted(SAME, 1.0),
    ignored_keys="hidden_activation",
    constants={"embeddings.scale": True},
)
"""Gemma Team 2024: norms store their scale less one; embeddings are scaled."""
GEMMA2 = _family(
    "Gemma2",
    _head_dim(256),
    _CAUSAL,
    _biases("attention_bias"),
    _WINDOW_OF_SOME_LAYERS,
    _windows(2),
    _QUERY_SCALAR,
    config_keys.number("attn_logit_softcapping", "attention.softcap", 50.0, nullable=True),
    config_keys.number("final_logit_softcapping", "output.softcap", 30.0, nullable=True),
    vocab_size=256_000,
    max_len=8192,
    sizes=_Sizes(d_model=2304, d_ff=9216, layers=26, heads=8, kv_heads=4),
    tied=True,
    activations={"gelu_pytorch_tanh": "gelu_tanh", **config_keys.ACTIVATIONS},
    activation_key="hidden_activation",
    scale=maps.shifted(SAME, 1.0),
    ignored_keys="hidden_act cache_implementation sliding_window_size",
    constants={"norm.placement": "sandwich", "embeddings.scale": True},
)
"""Gemma Team 2024b: norms on both sides of each sub-layer, a window in every other layer, soft caps
of the logits."""
GEMMA3 = _family(
    "Gemma3",
    _head_dim(256),
    _CAUSAL,
    _biases("attention_bias"),
    _WINDOW_OF_SOME_LAYERS,
    _windows(6, "sliding_window_pattern"),
    _QUERY_SCALAR,
    config_keys.number(
        "final_logit_softcapping", "output.softcap", None, kind=float, nullable=True
    ),
    vocab_size=262_208,
    max_len=131_072,
    sizes=_Sizes(d_model=2304, d_ff=9216, layers=26, heads=8, kv_heads=4),
    tied=True,
    activations={"gelu_pytorch_tanh": "gelu_tanh", **config_keys.ACTIVATIONS},
    activation_key="hidden_activation",
    scale=maps.shifted(SAME, 1.0),
    ignored_keys="hidden_act cache_implementation attn_logit_softcapping _sliding_window_pattern",
    constants={
        "norm.placement": "sandwich",
        "embeddings.scale": True,
        "attention.query_key_norm": True,
    },
    positions=rotary_by_layer(1e6, 1e4),
)._replace(
    model_type="gemma3_text",
    architectures={
        "Gemma3ForCausalLM": "decoder",
        "Gemma3TextModel": "bare_decoder",
        "Gemma3TextForSequenceClassification": "decoder_classifier",
    },
)
"""Gemma Team 2025, without images: norms of queries and keys in place of soft caps, rotary
positions of their own in layers with a window."""
