import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config import rotate
from jaxformer.config.positions import alibi_slopes, relative_buckets
from jaxformer.nn.models import DecoderOnly
from tests.configs import small

CONFIG = small(max_len=7)


@pytest.mark.parametrize("d_model", [1, 6, 7])
def test_the_table_is_the_formula_of_section_3_5(d_model):
    table = jf.positional_encoding(11, d_model)
    assert table.shape == (11, d_model) and table.dtype == np.float32
    for position in range(11):
        for column in range(d_model):
            angle = position / 10_000 ** (2 * (column // 2) / d_model)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert abs(table[position, column] - expected) < 1e-6


def turned(x, positions, base):
    return rotate(x, jf.Rotary(base).rotation(positions, x.shape[-1]))


def test_rotary_moves_16_bits_to_the_layout_of_halves():
    x = jnp.ones((2, 3, 5, 4), jnp.bfloat16)
    program = jax.make_jaxpr(lambda x: turned(x, np.arange(3), 10_000.0))(x)
    (split,) = (each for each in program.eqns if each.primitive.name == "split")
    assert split.invars[0].aval.dtype == jnp.bfloat16


def test_rotary_turns_a_pair_by_its_position():
    x = np.zeros((1, 3, 1, 4), np.float32)
    x[..., 0] = 1.0
    found = np.asarray(turned(x, np.arange(3), 10_000.0))[0, :, 0]
    expected = [[math.cos(t), 0.0, math.sin(t), 0.0] for t in range(3)]
    assert np.allclose(found, expected, atol=1e-6)


@pytest.fixture
def queries_and_keys(rng):
    return rng.standard_normal((2, 2, 5, 3, 6), np.float32)


def test_rotary_products_depend_on_distance_alone(queries_and_keys, assert_equal):
    @jax.jit
    def products(positions):
        q, k = (turned(x, positions, 100.0) for x in queries_and_keys)
        return jax.numpy.einsum("BTNH,BSNH->BNTS", q, k)

    near, far = products(np.arange(5)), products(np.arange(5) + 31)
    assert_equal(far, near)
    assert np.abs(near - products(np.arange(5) * 2)).max() > 0.1


def test_rotary_keeps_lengths_and_takes_positions_for_each_row(queries_and_keys, assert_equal):
    x = queries_and_keys[0]
    positions = np.array([[0, 1, 2, 0, 1], [3, 1, 4, 1, 5]])
    found = jax.jit(turned, static_argnums=2)(x, positions, 100.0)
    assert_equal(np.linalg.norm(found, axis=-1), np.linalg.norm(x, axis=-1))
    for row in range(2):
        alone = jax.jit(turned, static_argnums=2)(x[row : row + 1], positions[row], 100.0)
        assert_equal(found[row], alone[0], 1e-6)


def test_eight_alibi_slopes_halve_from_one_half_to_1_256():
    assert np.array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9, dtype=np.float32))


def test_twelve_alibi_slopes_take_every_second_of_sixteen_after_the_eight():
    sixteen = 2.0 ** (-0.5 * np.arange(1, 17))
    expected = [*(0.5 ** np.arange(1, 9)), *sixteen[::2][:4]]
    assert np.allclose(alibi_slopes(12), expected, rtol=1e-6)


def test_alibi_takes_the_slope_off_for_each_step_of_distance():
    distances = np.array([[2, 1, 0, -1], [3, 2, 1, 0]])
    bias = np.asarray(jf.Alibi().bias(distances, 2, False, {}))
    distance = np.array([[2, 1, 0, 1], [3, 2, 1, 0]])
    assert np.array_equal(bias, -np.stack([distance / 16, distance / 256])[None])


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 5, 12), np.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_a_relative_bias_is_its_buckets_number_for_each_head(causal, rng):
    scheme, table = jf.Relative(buckets=8, max_distance=11), rng.standard_normal((8, 3), np.float32)
    distances = np.arange(5, 9)[:, None] - np.arange(11)
    buckets = relative_buckets(distances, buckets=8, max_distance=11, causal=causal)
    bias = scheme.bias(distances, 3, causal, {"relative_bias": table})
    assert bias.shape == (1, 3, 4, 11)
    assert np.array_equal(bias[0], np.moveaxis(table[np.asarray(buckets)], -1, 0))


def add(scheme, x, positions, max_len=7, params=None):
    """`x` with positions, as a stack adds them."""
    if params is None:
        specs = scheme.params(12, 3, max_len, jax.nn.initializers.normal())
        params = {name: init(jax.random.key(0), shape) for name, (init, shape) in specs.items()}
    return scheme.add(x, positions, 5, params)


def test_learned_positions_that_end_too_early_are_refused(x):
    with pytest.raises(ValueError, match="max_len=4"):
        add(jf.Learned(), x, np.arange(5), max_len=4)


def test_each_row_may_have_positions_of_its_own(x, rng, assert_equal):
    table = rng.standard_normal((7, 12), np.float32)
    positions = np.array([[0, 1, 2, 0, 1], [6, 5, 4, 3, 2]])
    assert_equal(add(jf.Learned(), x, positions, params={"table": table}), x + table[positions])


@pytest.mark.parametrize("scheme", [jf.Rotary(), jf.Alibi(), jf.Relative(), jf.NoPositions()])
def test_relative_positions_add_nothing_to_the_embeddings(scheme, x):
    assert np.array_equal(add(scheme, x, np.arange(5)), x)


class HalfSpeed(jf.PositionScheme):
    """Acts at all three places: each position counts as half of one."""

    def add(self, x, positions, length, params):
        return x + jnp.sin(positions / 2).reshape(-1, x.shape[1], 1)

    def rotation(self, positions, head_dim):
        return jf.Rotary(100.0).rotation(positions / 2, head_dim)

    def bias(self, distances, num_heads, causal, params):
        return jf.Alibi().bias(distances, num_heads, causal, params) / 2


def test_a_scheme_of_a_user_acts_at_input_on_queries_and_keys_and_on_logits(rng, random_params):
    config = replace(CONFIG, num_decoder_layers=1, positions=jf.NoPositions())
    tokens = rng.integers(0, 17, (2, 6))
    params = random_params(DecoderOnly(config), tokens)

    def logits(scheme):
        model = DecoderOnly(replace(config, positions=scheme()))
        return np.asarray(jax.jit(model.apply)({"params": params}, tokens))

    every = logits(HalfSpeed)
    for method in ("add", "rotation", "bias"):
        without = type("Without", (HalfSpeed,), {method: getattr(jf.PositionScheme, method)})
        assert np.abs(logits(without) - every).max() > 1e-2, method
