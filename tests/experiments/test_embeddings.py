"""The seeds' own programs: positions, look-up, four steps to attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.examples.embeddings import attention_step_by_step, lookup, positions, word_senses
from experiments.examples.embeddings.attention_step_by_step import (
    causal_average,
    dot_product_attention,
    projected_attention,
    scaled_attention,
)
from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.layers import Embedding
from jaxformer.nn.models import EncoderOnly
from jaxformer.nn.positions import sinusoidal_positions
from jaxformer.ops.attention import reference
from jaxformer.ops.beam_cache import KeyValue
from jaxformer.ops.masks import AttentionMask
from jaxformer.pipelines import embed
from jaxformer.pretrained import save_pretrained
from jaxformer.text.tokenizers import train_words


@pytest.fixture
def x(rng):
    return rng.normal(size=(5, 7)).astype(np.float32)


def test_the_positions_are_the_printed_ones(capsys):
    positions.main(positions.PositionOptions(d_model=3, length=5, decimals=2))
    printed = [[float(word) for word in row.split()] for row in capsys.readouterr().out.split("\n")]
    assert printed[:5] == [
        [0.0, 1.0, 0.0],
        [0.84, 0.54, 0.0],
        [0.91, -0.42, 0.0],
        [0.14, -0.99, 0.01],
        [-0.76, -0.65, 0.01],
    ]


def test_the_printed_sums_are_embeddings_with_positions():
    rows = [[0.12, 0.94, 0.9], [0.14, 0.65, 0.22], [0.29, 0.58, 0.31]]
    rows += [[0.69, 0.37, 0.62], [0.25, 0.61, 0.65]]
    sums = [[0.12, 1.94, 0.9], [0.98, 1.19, 0.22], [1.2, 0.16, 0.31]]
    sums += [[0.83, -0.62, 0.63], [-0.51, -0.04, 0.66]]
    np.testing.assert_allclose(positions.add_positions(np.array(rows)), sums, atol=0.0051)


def test_the_position_matrix_is_kept_whole(tmp_path, capsys):
    path = tmp_path / "matrix.npy"
    positions.main(positions.PositionOptions(400, 100, 1, str(path)))
    kept = np.load(path)
    assert kept.shape == (100, 400)
    assert np.array_equal(kept, sinusoidal_positions(100, 400))
    assert len(capsys.readouterr().out.splitlines()) == 100


@pytest.mark.parametrize("distance", [1, 5, -3])
def test_a_shifted_position_is_a_linear_function_of_it(distance, assert_equal):
    table = sinusoidal_positions(40, 12)
    moved = table @ positions.shift(12, distance).T
    start, stop = max(0, -distance), 40 - max(0, distance)
    assert_equal(moved[start:stop], table[start + distance : stop + distance])


def test_a_matrix_without_columns_is_refused():
    with pytest.raises(ConfigError, match="d_model=0, but it must be at least 1"):
        positions.PositionOptions(d_model=0)


def test_a_product_with_one_hot_vectors_is_a_table_look_up(rng):
    table = rng.normal(size=(11, 7)).astype(np.float32)
    ids = rng.integers(0, 11, (2, 5))
    found = lookup.look_up(jnp.asarray(table), ids)
    assert np.array_equal(found, table[ids])
    assert np.array_equal(lookup.one_hot_product(jnp.asarray(table), ids), found)
    sizes = {"vocab_size": 11, "d_model": 7, "d_ff": 1, "num_heads": 1}
    config = TransformerConfig(**sizes, scale_embeddings=False)
    ours = Embedding(11, config).apply({"params": {"table": table}}, ids)
    assert np.array_equal(ours, found)


def test_the_two_ways_are_timed_and_compared(capsys):
    lookup.main(lookup.LookupOptions(vocab_size=13, d_model=3, tokens=5, rounds=2))
    first, *ways = capsys.readouterr().out.splitlines()
    assert first == "greatest difference 0.0"
    assert [line.split()[-1] for line in ways] == ["ms", "ms"]


def test_an_average_is_attention_that_compares_nothing(x, assert_equal):
    average = causal_average(x)
    assert_equal(average[2], x[:3].mean(axis=0))
    assert_equal(average, dot_product_attention(x, jnp.zeros_like(x)))


def test_dot_product_attention_is_scaled_attention_of_scale_one(x, assert_equal):
    weights = np.exp(x[1] @ x[:2].T)
    attended = dot_product_attention(x, x)
    assert_equal(attended[1], weights @ x[:2] / weights.sum())
    assert_equal(attended, scaled_attention(x, x, 1.0))
    assert np.abs(attended - scaled_attention(x, x, 0.5)).max() > 1e-2


def test_scaled_attention_is_projected_by_unit_matrices(x, assert_equal):
    unit = jnp.eye(7)
    scaled = scaled_attention(x, x, 7**-0.5)
    assert_equal(scaled, projected_attention(x, unit, unit, unit))
    assert np.abs(scaled - projected_attention(x, unit, -unit, unit)).max() > 1e-2


def test_projected_attention_is_one_head_of_ours(x, rng, assert_equal):
    query, key = rng.normal(size=(2, 7, 3)).astype(np.float32)
    value = rng.normal(size=(7, 4)).astype(np.float32)
    expected = projected_attention(x, query, key, value)
    heads = [(x @ matrix)[None, :, None] for matrix in (query, key, value)]
    attended = reference(*heads, AttentionMask(causal=True), scale=3**-0.5)
    assert_equal(expected, attended[0, :, 0])

    sizes = {"vocab_size": 1, "d_model": 7, "d_ff": 1, "num_heads": 1}
    config = TransformerConfig(**sizes, head_dim=3, value_head_dim=4, use_bias=False)
    out = rng.normal(size=(1, 4, 7)).astype(np.float32)
    kernels = {"query": query[:, None], "key": key[:, None], "value": value[:, None], "out": out}
    params = {name: {"kernel": kernel} for name, kernel in kernels.items()}

    def attend(module, x):
        kv = module.keys_values(x)
        assert isinstance(kv, KeyValue)
        return module(x, kv, AttentionMask(causal=True))

    ours = MultiHeadAttention(config).apply({"params": params}, x[None], method=attend)
    assert_equal(ours[0], expected @ out[0])


def test_no_rung_sees_the_future(x):
    matrices = jnp.eye(7), -jnp.eye(7), jnp.eye(7)
    rungs = (
        causal_average,
        lambda x: dot_product_attention(x, x),
        lambda x: scaled_attention(x, x, 0.3),
        lambda x: projected_attention(x, *matrices),
    )
    for rung in rungs:
        slopes = np.abs(jax.jacobian(rung)(jnp.asarray(x))).sum(axis=(1, 3))
        assert (slopes[np.triu_indices(5, 1)] == 0).all()
        assert (slopes[np.tril_indices(5)] > 0).all()


def test_scaling_spreads_what_products_of_long_vectors_would_give_to_one_token(capsys):
    attention_step_by_step.main(attention_step_by_step.StepOptions(length=6, d_model=64))
    _, *lines = capsys.readouterr().out.splitlines()
    weights = [[float(word) for word in line[26:].split()] for line in lines]
    assert len(weights) == 4
    for row in weights:
        assert sum(row) == pytest.approx(1.0, abs=0.004)
    average, plain, scaled, projected = weights
    assert average == [pytest.approx(1 / 6, abs=1e-3)] * 6
    assert plain[-1] == 1.0 > scaled[-1] > projected[-1]


@pytest.fixture(scope="module")
def reader(random_params):
    """A small random encoder with a vocabulary of words."""
    tokenizer = train_words(["the river bank", "the money bank lends"], 20)
    sizes = {"d_model": 12, "d_ff": 16, "num_heads": 3, "num_encoder_layers": 1}
    model = EncoderOnly(TransformerConfig(tokenizer.vocab_size, **sizes))
    return model, random_params(model, np.ones((1, 3), np.int32)), tokenizer


def test_a_word_has_one_learned_vector_and_one_for_each_context(reader, assert_equal):
    model, params, tokenizer = reader
    texts = ("the river bank", "the money bank lends the bank")
    found = word_senses.word_vectors(*reader, "bank", texts)
    row = params["embedding"]["table"][tokenizer.encode("bank")[0]] * 12**0.5
    assert_equal(found.learned, row)
    both = [one.contextual[2] for one in embed(model, params, texts, tokenizer)]
    np.testing.assert_array_equal(found.contextual, both)
    assert np.abs(both[0] - both[1]).max() > 1e-2

    _, learned, first, second = word_senses.report("bank", found)
    assert learned.split("|")[1].split()[0] == "1.000"
    assert learned.split()[1:6] == [f"{value:.2f}" for value in found.learned[:5]]
    between = both[0] @ both[1] / np.linalg.norm(both[0]) / np.linalg.norm(both[1])
    assert first.split("|")[1].split()[2] == second.split("|")[1].split()[1] == f"{between:.3f}"


def test_a_word_that_cannot_be_compared_is_refused(reader):
    with pytest.raises(DataError, match="'river bank' is 2 tokens to this vocabulary"):
        word_senses.word_vectors(*reader, "river bank", ["the river bank"] * 2)
    with pytest.raises(DataError, match="text 2 has no token ' bank', only  the  river: give"):
        word_senses.word_vectors(*reader, "bank", ["the bank", "the river"])
    with pytest.raises(ConfigError, match="1 texts were given: give 2 or more to compare"):
        word_senses.WordSensesOptions(texts=("the bank",))
    with pytest.raises(ConfigError, match="no model was given: give --model FOLDER"):
        word_senses.main(word_senses.WordSensesOptions())


def test_bank_reads_the_folder_of_a_distilbert(tmp_path, capsys, random_params):
    texts = "a man fishing on a river bank", "a man withdrawing money from a bank"
    tokenizer = train_words(list(texts), 60)
    sizes = {"d_model": 12, "d_ff": 16, "num_heads": 3, "num_encoder_layers": 1, "max_len": 30}
    config = TransformerConfig(
        tokenizer.vocab_size,
        **sizes,
        positions="learned",
        norm_eps=1e-12,
        activation="gelu",
        tied_embeddings="output",
        scale_embeddings=False,
        embedding_norm=True,
        initializer="normal",
    )
    model = EncoderOnly(config)
    params = random_params(model, np.ones((1, 3), np.int32))
    save_pretrained(tmp_path / "tiny", model, params, tokenizer, family="distilbert")
    save_pretrained(tmp_path / "mute", model, params, family="distilbert")
    word_senses.main(word_senses.WordSensesOptions(str(tmp_path / "tiny"), texts=texts))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "text 1: a man fishing on a river bank"
    assert [line.split()[0] for line in lines[3:]] == ["learned", "in", "in"]
    with pytest.raises(ConfigError, match="mute has no tokenizer: give a folder with one"):
        word_senses.main(word_senses.WordSensesOptions(str(tmp_path / "mute"), texts=texts))
