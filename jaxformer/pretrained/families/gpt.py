"""Decoders without shared key/value heads: GPT-2, GPT-NeoX with Pythia, and OPT."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import Learned, Rotary
from jaxformer.pretrained import config_keys
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.families.bart import block as bart_block
from jaxformer.pretrained.families.decoder import Names, decoder
from jaxformer.pretrained.families.rotary import rotary
from jaxformer.pretrained.weight_map import FLAT, Entry


def _query_key_value(path: str, leaf: str) -> tuple[str, str, str]:
    """Our paths of a kernel or a bias of the three projections in the block at `path`."""
    attention = f"{path}/attention"
    return f"{attention}/query/{leaf}", f"{attention}/key/{leaf}", f"{attention}/value/{leaf}"


def _gpt2_block(path: str, hf: str, *_: Any) -> list[Entry]:
    names = {
        "attention_norm": "ln_1",
        "attention/out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward/up": "mlp.c_fc",
        "feed_forward/down": "mlp.c_proj",
    }
    entries = maps.layers(path, hf, names, kernel=maps.conv1d)
    # One tensor has the queries of all heads, then all keys, then all values.
    joined = f"{hf}.attn.c_attn"
    kernels, biases = _query_key_value(path, "kernel"), _query_key_value(path, "bias")
    entries.append(Entry(kernels, (f"{joined}.weight",), transform=maps.conv1d()))
    entries.append(Entry(biases, (f"{joined}.bias",), transform=FLAT))
    return entries


def _neox_block(path: str, hf: str, *_: Any) -> list[Entry]:
    names = {
        "attention_norm": "input_layernorm",
        "attention/out": "attention.dense",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward/up": "mlp.dense_h_to_4h",
        "feed_forward/down": "mlp.dense_4h_to_h",
    }
    entries = maps.layers(path, hf, names)
    # One tensor has query, key and value of the first head, then of the second, and so on.
    joined = f"{hf}.attention.query_key_value"
    kernels, biases = _query_key_value(path, "kernel"), _query_key_value(path, "bias")
    entries.append(Entry(kernels, (f"{joined}.weight",), joined=maps.linear()))
    entries.append(Entry(biases, (f"{joined}.bias",), joined=FLAT))
    return entries


GPT2 = decoder(
    "gpt2",
    "GPT2",
    Names(
        embedding="transformer.wte",
        blocks="transformer.h",
        block=_gpt2_block,
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
    ),
    [
        config_keys.number("vocab_size", "vocab_size", 50_257),
        config_keys.number("n_positions", "max_len", 1024),
        config_keys.number("n_embd", "d_model", 768),
        config_keys.number("n_layer", "num_decoder_layers", 12),
        config_keys.number("n_head", "num_heads", 12),
        config_keys.number("n_inner", "d_ff", lambda fields: 4 * fields["d_model"]),
        config_keys.choice(
            "activation_function", "feed_forward.activation", "gelu_new", config_keys.ACTIVATIONS
        ),
        config_keys.tied_output(True),
        config_keys.number("layer_norm_epsilon", "norm.eps", 1e-5),
        config_keys.number("resid_pdrop", "dropout_rate", 0.1),
        config_keys.number("attn_pdrop", "attention.dropout_rate", 0.1),
        config_keys.constant("scale_attn_weights", True),
        config_keys.constant("scale_attn_by_inverse_layer_idx", False),
        config_keys.constant("add_cross_attention", False),
    ],
    constants={
        "positions": Learned(),
        "norm.placement": "pre",
        "initializer": "scaled_normal",
    },
    language_model="LMHeadModel",
    inputs_first=r"\.(c_attn|c_proj|c_fc)\.weight$",
    ignored_tensors=r"\.attn\.(masked_)?bias$",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    ignored_keys=frozenset(
        """n_ctx predict_special_tokens embd_pdrop reorder_and_upcast_attn summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""".split()
    ),
)
"""Radford et al. 2019. The dropout of embeddings (`embd_pdrop`) is `dropout_rate` here."""
GPT_NEOX = decoder(
    "gpt_neox",
    "GPTNeoX",
    Names(
        embedding="gpt_neox.embed_in",
        blocks="gpt_neox.layers",
        block=_neox_block,
        final_norm="gpt_neox.final_layer_norm",
        output="embed_out",
    ),
    [
        config_keys.number("vocab_size", "vocab_size", 50_432),
        config_keys.number("max_position_embeddings", "max_len", 2048),
        config_keys.number("hidden_size", "d_model", 6144),
        config_keys.number("num_hidden_layers", "num_decoder_layers", 44),
        config_keys.number("num_attention_heads", "num_heads", 64),
        config_keys.number("intermediate_size", "d_ff", 24_576),
        config_keys.choice(
            "hidden_act", "feed_forward.activation", "gelu", config_keys.ACTIVATIONS
        ),
        config_keys.tied_output(False),
        config_keys.choice(
            "use_parallel_residual", "norm.placement", True, {True: "parallel", False: "pre"}
        ),
        config_keys.number("layer_norm_eps", "norm.eps", 1e-5),
        config_keys.number("hidden_dropout", "dropout_rate", 0.0),
        config_keys.number("attention_dropout", "attention.dropout_rate", 0.0),
        rotary("rotary_emb_base", "rotary_pct", 0.25),
        config_keys.constant("attention_bias", True),
        config_keys.constant("is_decoder", False),
    ],
    constants={"positions": Rotary()},
    renamed_endings={"lm_head.weight": "embed_out.weight"},
    ignored_tensors=r"\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)$",
    ignored_keys=frozenset(["classifier_dropout"]),
)
"""Black et al. 2022: rotary positions in a part of each head, parallel sub-layers."""


def _read_embedding_size(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """No field; `ConfigError` for embeddings of another size than the model, as opt-350m has."""
    if hf.get(_EMBEDDING) not in (None, fields["d_model"]):
        raise config_keys.unsupported(_EMBEDDING, hf[_EMBEDDING], fields["d_model"])
    return {}


_EMBEDDING = "word_embed_proj_dim"

OPT = decoder(
    "opt",
    "OPT",
    Names(
        embedding="model.decoder.embed_tokens",
        blocks="model.decoder.layers",
        block=lambda path, hf, *_: bart_block(path, hf),
        final_norm="model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        table=maps.rows_after(2),
    ),
    [
        config_keys.number("vocab_size", "vocab_size", 50_272),
        config_keys.number("max_position_embeddings", "max_len", 2048),
        config_keys.number("hidden_size", "d_model", 768),
        config_keys.number("num_hidden_layers", "num_decoder_layers", 12),
        config_keys.number("num_attention_heads", "num_heads", 12),
        config_keys.number("ffn_dim", "d_ff", 3072),
        config_keys.choice(
            "activation_function", "feed_forward.activation", "relu", config_keys.ACTIVATIONS
        ),
        config_keys.choice(
            "do_layer_norm_before", "norm.placement", True, {True: "pre", False: "post"}
        ),
        config_keys.tied_output(True),
        config_keys.number("dropout", "dropout_rate", 0.1),
        config_keys.number("attention_dropout", "attention.dropout_rate", 0.0),
        config_keys.constant("enable_bias", True),
        config_keys.constant("layer_norm_elementwise_affine", True),
        config_keys.constant("_remove_final_layer_norm", False),
        config_keys.Key(
            (_EMBEDDING,), _read_embedding_size, lambda config: {_EMBEDDING: config.d_model}
        ),
    ],
    constants={"positions": Learned(), "norm.eps": 1e-5},
    ignored_keys=frozenset(["layerdrop", "init_std"]),
)
"""Zhang et al. 2022: learned positions after two unused rows, relu."""
