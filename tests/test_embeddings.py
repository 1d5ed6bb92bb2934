"""The seeds' own programs: positions, look-up, the ladder to attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.embeddings import ladder, lookup, positions
from experiments.embeddings.ladder import (
    causal_average,
    dot_product_attention,
    projected_attention,
    scaled_attention,
)
from jaxformer.attention import MultiHeadAttention
from jaxformer.cache import KeysValues
from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.kernels import reference
from jaxformer.layers import Embedding
from jaxformer.masks import Mask
from jaxformer.positions import sinusoidal_positions


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
    kernel = reference(*heads, Mask(causal=True), scale=3**-0.5)
    assert_equal(expected, kernel[0, :, 0])

    sizes = {"vocab_size": 1, "d_model": 7, "d_ff": 1, "num_heads": 1}
    config = TransformerConfig(**sizes, head_dim=3, value_head_dim=4, use_bias=False)
    out = rng.normal(size=(1, 4, 7)).astype(np.float32)
    kernels = {"query": query[:, None], "key": key[:, None], "value": value[:, None], "out": out}
    params = {name: {"kernel": kernel} for name, kernel in kernels.items()}

    def attend(module, x):
        kv = module.keys_values(x)
        assert isinstance(kv, KeysValues)
        return module(x, kv, Mask(causal=True))

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
    ladder.main(ladder.LadderOptions(length=6, d_model=64))
    _, *lines = capsys.readouterr().out.splitlines()
    weights = [[float(word) for word in line[26:].split()] for line in lines]
    assert len(weights) == 4
    for row in weights:
        assert sum(row) == pytest.approx(1.0, abs=0.004)
    average, plain, scaled, projected = weights
    assert average == [pytest.approx(1 / 6, abs=1e-3)] * 6
    assert plain[-1] == 1.0 > scaled[-1] > projected[-1]
