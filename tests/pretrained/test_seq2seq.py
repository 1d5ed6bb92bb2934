"""Weights of T5, Marian and BART: what their tables do, and what is refused."""

import jax
import numpy as np
import pytest

from jaxformer.config import Learned
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import load_pretrained, save_pretrained
from tests.pretrained.models import T5, inputs_of, model_of


@pytest.fixture
def pair(filled, folder):
    """The parameters of one of `MODELS`, and a copy of its folder, to be changed."""
    return lambda name: (filled(name)[1], folder(name))


def test_todays_way_of_writing_t5_1_1_is_read_too(pair, change, rewrite):
    """Tied in name, not scaled, with an output of its own; without that, the embedding's."""
    params, folder = pair("t5 1.1")
    change(folder, tie_word_embeddings=True, scale_decoder_outputs=False, is_gated_act=True)
    loaded = load_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    rewrite(folder, lambda x: {k: v for k, v in x.items() if k != "lm_head.weight"})
    loaded = load_pretrained(folder)
    assert loaded.model.config.embeddings.tied == "all"
    np.testing.assert_array_equal(
        loaded.params["decoder"]["final_norm"]["scale"], params["decoder"]["final_norm"]["scale"]
    )


def test_copies_of_t5s_embedding_must_be_equal(pair, rewrite):
    params, folder = pair("t5")
    table = params["embedding"]["table"]
    copies = {"encoder.embed_tokens.weight": table, "lm_head.weight": table}
    rewrite(folder, lambda x: x | copies)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, params)
    rewrite(folder, lambda x: x | {"lm_head.weight": table + 1})
    with pytest.raises(DataError, match="lm_head.weight and shared.weight"):
        load_pretrained(folder)


def test_the_table_of_sines_that_early_versions_wrote_is_passed_over(pair, rewrite):
    params, folder = pair("marian")
    sines = np.zeros((11, 12), np.float32)
    rewrite(folder, lambda x: x | {"model.encoder.embed_positions.weight": sines})
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(folder).params, params)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, 'feed_forward_proj="gated-tanh"'),
        ("t5", {"feed_forward_proj": 3}, "feed_forward_proj=3"),
        ("bart", {"encoder_ffn_dim": 5}, "encoder_ffn_dim=5 and decoder_ffn_dim="),
        ("t5", {"is_decoder": True}, "is_decoder=true"),
        ("t5", {"d_kv": "wide"}, 'd_kv="wide"'),
        ("t5", {"tie_word_embeddings": 2}, "scale_decoder_outputs=2"),
        ("t5", {"architectures": ["T5Model"]}, r"architectures=\['T5Model'\]"),
        ("m2m_100", {"pad_token_id": 3}, "pad_token_id=3"),
        ("marian", {"encoder_attention_heads": 5}, "encoder_attention_heads=5 and decoder_"),
        ("marian", {"tie_word_embeddings": False}, "share_encoder_decoder_embeddings=true with"),
        ("marian", {"decoder_vocab_size": 24}, "vocab_size=23, decoder_vocab_size=24 and"),
        ("marian", {"decoder_vocab_size": "many"}, 'decoder_vocab_size="many"'),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(name, changes, message, pair, change):
    _, folder = pair(name)
    change(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embeddings.tied": "output"}, "t5: embeddings.tied='output'"),
        (
            {"feed_forward.activation": "gelu", "feed_forward.gated": True},
            "t5: gated layers with activation='gelu' are not",
        ),
        ({"output.bias": True}, "t5: output.bias=True"),
        ({"positions": Learned()}, r"t5: positions=Learned\(\)"),
    ],
)
def test_what_t5_does_not_support_is_not_written(changes, message, random_params, tmp_path):
    model = model_of(T5, changes)
    params = random_params(model, *inputs_of(model))
    with pytest.raises(ConfigError, match=message):
        save_pretrained(tmp_path / "new", model, params, family="t5")
