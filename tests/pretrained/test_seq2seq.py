"""Weights of T5 and Marian: tables and settings, without anything of theirs installed."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    OutputOptions,
    Relative,
    Sinusoidal,
    TransformerConfig,
    with_fields,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import EncoderDecoder, EncoderOnly
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import write_config
from jaxformer.pretrained.model_specs import param_shapes, spec_of

# Heads of 4 and a width of 16: the square roots that T5's table holds are powers of two.
T5 = TransformerConfig(
    vocab_size=23,
    d_model=16,
    d_ff=17,
    num_heads=3,
    head_dim=4,
    num_encoder_layers=1,
    num_decoder_layers=2,
    max_len=11,
    norm=NormOptions("rms", placement="pre"),
    embeddings=EmbeddingOptions(scale=False),
    positions=Relative(buckets=6, max_distance=9),
    use_bias=False,
)
MARIAN = TransformerConfig(
    vocab_size=23,
    d_model=12,
    d_ff=17,
    num_heads=3,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_len=11,
    norm=NormOptions(eps=1e-5),
    feed_forward=FeedForwardOptions("silu"),
    output=OutputOptions(bias=True),
    positions=Sinusoidal(layout="halves"),
)
BART = with_fields(
    MARIAN,
    {
        "positions": Learned(),
        "feed_forward.activation": "gelu",
        "embeddings.norm": True,
        "embeddings.scale": False,
    },
)
M2M100 = with_fields(
    MARIAN,
    {
        "positions": Sinusoidal("halves", endpoint=True, offset=2),
        "feed_forward.activation": "relu",
        "norm.placement": "pre",
        "output.bias": False,
    },
)
GATED = {"feed_forward.activation": "gelu_tanh", "feed_forward.gated": True}


def model_of(config, changes):
    return EncoderDecoder(with_fields(config, changes))


MODELS = {
    "t5": ("t5", EncoderDecoder(T5)),
    "t5 1.1": ("t5", model_of(T5, {"embeddings.tied": "inputs", **GATED})),
    "t5, heads as wide as the model": ("t5", model_of(T5, {"num_heads": 4, **GATED})),
    "t5's encoder": ("t5", EncoderOnly(with_fields(T5, {"feed_forward.activation": "silu"}))),
    "mt5": ("mt5", model_of(T5, {"embeddings.tied": "inputs", **GATED})),
    "mt5, tied": ("mt5", EncoderDecoder(T5)),
    "bart": ("bart", EncoderDecoder(BART)),
    "mbart": ("mbart", model_of(BART, {"norm.placement": "pre"})),
    "m2m_100": ("m2m_100", EncoderDecoder(M2M100)),
    "marian": ("marian", EncoderDecoder(MARIAN)),
    "marian, two vocabularies": (
        "marian",
        model_of(MARIAN, {"embeddings.tied": "output", "source_vocab_size": 19}),
    ),
    "bart, a wider encoder": (
        "bart",
        model_of(BART, {"encoder.num_heads": 4, "encoder.d_ff": 19}),
    ),
    "marian, three tables": ("marian", model_of(MARIAN, {"embeddings.tied": "none"})),
}
TOKENS = np.array([[1, 5, 7, 2, 18], [3, 9, 4, 0, 0]])


@pytest.fixture(scope="module")
def written(random_params, tmp_path_factory):
    """Random parameters of one of `MODELS`, and the folder of them, which is written once."""
    root, params = tmp_path_factory.mktemp("written"), {}

    def write(name):
        if name not in params:
            family, model = MODELS[name]
            inputs = (TOKENS,) if isinstance(model, EncoderOnly) else (TOKENS, TOKENS)
            params[name] = random_params(model, *inputs)
            save_pretrained(root / name, model, params[name], family=family)
        return params[name], root / name

    return write


@pytest.fixture
def saved(written, tmp_path):
    """The same, with a copy of the folder, to be changed."""

    def copy(name):
        params, folder = written(name)
        return params, shutil.copytree(folder, tmp_path / "saved")

    return copy


def change(folder, **settings):
    """Changes config.json; None takes a key out."""
    path = folder / "config.json"
    said = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def rewrite(folder, **tensors):
    """Adds tensors to the folder, or takes them out where None is given."""
    path = folder / "model.safetensors"
    found = load_file(path) | {name.replace("__", "."): leaf for name, leaf in tensors.items()}
    kept = {name: np.ascontiguousarray(x) for name, x in found.items() if x is not None}
    save_file(kept, path)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_loaded_again_to_the_bit(name, saved):
    family, model = MODELS[name]
    params, folder = saved(name)
    loaded = load_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    assert type(loaded.model) is type(model)
    assert spec_of(loaded.model).effective_fields() == spec_of(model).effective_fields()
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


@pytest.mark.parametrize("name", MODELS)
def test_a_table_names_each_parameter_once(name):
    family, model = MODELS[name]
    spec = spec_of(model)
    table = FAMILIES[family].weight_map(spec, write_config(FAMILIES[family], spec))
    ours = [path for row in table for path in row.jax]
    theirs = [name for row in table for name in row.hf]
    assert sorted(ours) == sorted(param_shapes(model))
    assert len(set(theirs)) == len(theirs)


def test_a_query_of_t5_holds_the_root_of_its_size_and_the_last_norm_that_of_the_width(saved):
    params, folder = saved("t5")
    tensors = load_file(folder / "model.safetensors")
    for part, name in (("attention", "0.SelfAttention"), ("cross_attention", "1.EncDecAttention")):
        ours = params["decoder"]["blocks_1"][part]
        theirs = f"decoder.block.1.layer.{name}"
        query = tensors[f"{theirs}.q.weight"].T.reshape(16, 3, 4)
        np.testing.assert_array_equal(ours["query"]["kernel"], 2 * query)
        key = tensors[f"{theirs}.k.weight"].T.reshape(16, 3, 4)
        np.testing.assert_array_equal(ours["key"]["kernel"], key)
    last = tensors["decoder.final_layer_norm.weight"]
    np.testing.assert_array_equal(params["decoder"]["final_norm"]["scale"], last / 4)
    assert "lm_head.weight" not in tensors


def test_an_output_of_t5_1_1_is_not_scaled(saved):
    params, folder = saved("t5 1.1")
    tensors = load_file(folder / "model.safetensors")
    last = tensors["decoder.final_layer_norm.weight"]
    np.testing.assert_array_equal(params["decoder"]["final_norm"]["scale"], last)
    np.testing.assert_array_equal(params["output"]["kernel"], tensors["lm_head.weight"].T)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_todays_way_of_writing_t5_1_1_is_read_too(saved):
    """Tied in name, not scaled, with an output of its own; without that, the embedding's."""
    params, folder = saved("t5 1.1")
    change(folder, tie_word_embeddings=True, scale_decoder_outputs=False, is_gated_act=True)
    loaded = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    rewrite(folder, lm_head__weight=None)
    loaded = load_pretrained(folder)
    assert loaded.model.config.embeddings.tied == "all"
    np.testing.assert_array_equal(
        loaded.params["decoder"]["final_norm"]["scale"], params["decoder"]["final_norm"]["scale"]
    )


def test_copies_of_t5s_embedding_must_be_equal(saved):
    params, folder = saved("t5")
    table = params["embedding"]["table"]
    rewrite(folder, encoder__embed_tokens__weight=table, lm_head__weight=table)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, params)
    rewrite(folder, lm_head__weight=table + 1)
    with pytest.raises(DataError, match=r"lm_head.weight and shared.weight are one tensor"):
        load_pretrained(folder)


def test_the_bias_and_the_tables_of_marian_are_where_they_write_them(saved):
    params, folder = saved("marian, two vocabularies")
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["final_logits_bias"], params["output"]["bias"][None])
    for name, path in (("encoder", "source_embedding"), ("decoder", "embedding")):
        table = tensors[f"model.{name}.embed_tokens.weight"]
        np.testing.assert_array_equal(table, params[path]["table"])
    said = json.loads((folder / "config.json").read_text())
    assert (said["vocab_size"], said["decoder_vocab_size"]) == (19, 23)


def test_the_table_of_sines_that_early_versions_wrote_is_passed_over(saved):
    params, folder = saved("marian")
    sines = np.zeros((11, 12), np.float32)
    rewrite(folder, model__encoder__embed_positions__weight=sines)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, params)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh' .* is not"),
        ("t5", {"feed_forward_proj": "twice-relu"}, "feed_forward_proj='twice-relu'"),
        ("t5", {"feed_forward_proj": 3}, "feed_forward_proj=3 with dense_act_fn='' and"),
        ("t5", {"dense_act_fn": "gelu"}, "dense_act_fn='gelu' and is_gated_act=False is not"),
        ("t5", {"is_gated_act": True}, "is_gated_act=True is not supported"),
        ("t5", {"is_decoder": True}, "is_decoder=true is not supported"),
        ("t5", {"d_kv": "wide"}, 'd_kv="wide", but it must be a whole number'),
        ("t5", {"dropout_rate": "some"}, 'dropout_rate="some"'),
        ("t5", {"tie_word_embeddings": 2}, "scale_decoder_outputs=2, but it must be true or"),
        ("t5", {"architectures": ["T5Model"]}, r"architectures=\['T5Model'\] is not"),
        ("m2m_100", {"pad_token_id": 3}, "pad_token_id=3 is not supported: only 1"),
        ("marian", {"encoder_attention_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ("marian", {"encoder_ffn_dim": 1.5}, "encoder_ffn_dim=1.5, but it must be a whole number"),
        ("marian", {"tie_word_embeddings": False}, "share_encoder_decoder_embeddings=true with"),
        ("marian", {"decoder_vocab_size": 24}, "vocab_size=23, decoder_vocab_size=24 and"),
        ("marian", {"vocab_size": "many"}, 'json: vocab_size="many", but it must be a whole'),
        ("marian", {"decoder_vocab_size": "many"}, 'decoder_vocab_size="many", but it must be'),
        ("marian", {"tie_word_embeddings": 2}, "tie_word_embeddings=2, but it must be true or"),
        ("marian", {"activation_function": "tanh"}, 'activation_function="tanh" is not supported'),
        ("marian", {"is_decoder": True}, "is_decoder=true is not supported"),
        ("marian", {"static_position_embeddings": False}, "static_position_embeddings=false"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding=true is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(name, changes, message, saved):
    _, folder = saved(name)
    change(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embeddings.tied": "output"}, "t5: embeddings.tied='output', but it has 'all'"),
        (
            {"feed_forward.activation": "gelu", "feed_forward.gated": True},
            "t5: gated layers with activation='gelu' are not",
        ),
        ({"output.bias": True}, "t5: output.bias=True, but it has False"),
        ({"positions": Learned()}, r"t5: positions=Learned\(\), but it has Relative"),
    ],
)
def test_what_t5_does_not_support_is_not_written(changes, message, random_params, tmp_path):
    model = model_of(T5, changes)
    params = random_params(model, TOKENS, TOKENS)
    with pytest.raises(ConfigError, match=message):
        save_pretrained(tmp_path / "new", model, params)
