"""The properties of `blockwise` besides computing the formula: blocks, memory, transformations."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxformer.config import NormOptions
from jaxformer.nn.blocks import Block
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import blockwise, reference
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

pytestmark = pytest.mark.usefixtures("optimized")

B, T, S, N, K, H, HV = 2, 11, 13, 6, 2, 5, 3
CAUSAL = AttentionMask(causal=True)
SMALL = partial(blockwise, block=4)  # 3 blocks of queries and 4 of keys, the last ones ragged


def draw(rng):
    """q, k, v and a bias."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, HV), (B, N, T, S)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.fixture
def inputs(rng):
    return draw(rng)


def value_and_gradients(attention_fn, *, mask, dropout=None):
    """A function of (q, k, v, bias): attention, and the gradients of a fixed mixture of it."""
    direction = np.random.default_rng(7).standard_normal((B, T, N, HV)).astype(np.float32)

    def mixture(q, k, v, bias):
        out = attention_fn(q, k, v, mask, scale=0.7, bias=bias, dropout=dropout)
        return (out * direction).sum(), out

    return jax.value_and_grad(mixture, argnums=(0, 1, 2, 3), has_aux=True)


def assert_same(given, expected, assert_equal):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert_equal(a, b, 2e-5)


def scan_lengths(f, *inputs):
    """The number of steps the loops of `f` take, as its trace says."""

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield equation.params["length"]
            for inner in jaxprs_in_params(equation.params):
                yield from visit(inner)

    return list(visit(jax.make_jaxpr(f)(*inputs).jaxpr))


def test_an_explicit_row_may_be_for_all_queries(inputs, rng, assert_equal):
    mask = AttentionMask(explicit=jnp.asarray(rng.random((B, 1, S)) < 0.6))
    given, expected = (value_and_gradients(f, mask=mask)(*inputs) for f in (SMALL, reference))
    assert_same(given, expected, assert_equal)


@pytest.mark.parametrize(("offset", "window"), [(0, None), (2, None), (0, 3), (2, 5), (-6, None)])
def test_blocks_in_which_nothing_can_be_seen_are_not_visited(offset, window, inputs):
    mask = AttentionMask(causal=True, offset=offset, window=window)
    # The positions that fill up the last blocks count as if they were real.
    seen = np.asarray(mask.materialize(12, 16))[0, 0].reshape(3, 4, 4, 4).any((1, 3)).sum()
    assert 0 < seen < 12
    assert scan_lengths(value_and_gradients(SMALL, mask=mask), *inputs) == [seen, seen]


def test_an_offset_known_only_at_run_time_visits_all_blocks(inputs):
    def attend(offset):
        return SMALL(*inputs[:3], AttentionMask(causal=True, offset=offset), scale=0.7)

    assert scan_lengths(attend, 2) == [12]


def test_no_block_of_weights_is_transposed():
    """On a CPU, XLA takes as long for that as for a product."""
    x = jax.ShapeDtypeStruct((B, 67, N, H), jnp.float32)

    def total(q, k, v):
        return (blockwise(q, k, v, CAUSAL, scale=0.7, block=32) ** 2).sum()

    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x).compile().as_text()
    sizes = re.findall(r"= f32\[([\d,]+)\]\S* transpose\(", text)
    numbers = [math.prod(map(int, size.split(","))) for size in sizes]
    assert B * N * 32 * H in numbers and B * N * 32 * 32 not in numbers


@pytest.mark.parametrize(
    "remat, loops", [pytest.param("blocks", 3, marks=pytest.mark.long), ("all_but_attention", 2)]
)
def test_a_block_that_keeps_the_result_does_not_compute_it_twice(remat, loops, rng, random_params):
    pre = NormOptions(placement="pre")
    block = REMAT[remat](num_heads=2, d_ff=10, norm_options=pre, attention_fn=blockwise)
    plain = Block(num_heads=2, d_ff=10, norm_options=pre)
    x = rng.standard_normal((B, T, 6), np.float32)
    params = random_params(plain, x, CAUSAL)

    def total(params, block):
        return (block.apply({"params": params}, x, CAUSAL) ** 2).sum()

    given, expected = (jax.grad(partial(total, block=one)) for one in (block, plain))
    assert len(scan_lengths(given, params)) == loops
    both = jax.jit(
        lambda params: (given(params), expected(params)),
        compiler_options={"xla_backend_optimization_level": 0},  # a quarter of the time to compile
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *both(params))


@pytest.mark.long
def test_row_by_row_and_rematerialised_it_is_reference(inputs, assert_equal):
    valid = jnp.arange(S)[None] < jnp.array([S, 6])[:, None]
    dropout_rng = DropoutRng(jax.random.key(3), jnp.array([5, 2]))

    def attend(row, q, k, v, valid, offset):
        mask = AttentionMask(causal=True, offset=offset, padding_mask=valid[None])
        dropout = DropoutMask(DropoutRng(dropout_rng.key, row[None]), "name", 0.4)
        return SMALL(q[None], k[None], v[None], mask, scale=0.7, dropout=dropout)[0]

    def alone(q, k, v):
        return jax.vmap(jax.checkpoint(attend))(
            dropout_rng.example_ids, q, k, v, valid, jnp.full(B, 2)
        )

    def together(q, k, v):
        mask = AttentionMask(causal=True, offset=2, padding_mask=valid)
        return reference(q, k, v, mask, scale=0.7, dropout=DropoutMask(dropout_rng, "name", 0.4))

    def gradients(f):
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(*inputs[:3])

    assert_same(gradients(alone), gradients(together), assert_equal)


def test_weights_are_summed_up_in_float32(rng):
    """A bfloat16 sum of 600 equal weights would stand still at 256."""
    q, k = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.zeros((1, 600, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 600, 1, 8), jnp.bfloat16)

    def total(v):
        return blockwise(q, k, v, AttentionMask(), scale=1.0, block=1).sum()

    out, gradient = jax.jit(jax.value_and_grad(total))(v)
    assert out == 8
    assert gradient.dtype == jnp.bfloat16 and np.allclose(gradient, 1 / 600, rtol=0.01)


def test_a_block_has_at_least_one_position(inputs):
    with pytest.raises(ValueError, match="block=0 "):
        blockwise(*inputs[:3], AttentionMask(), scale=0.7, block=0)


@pytest.mark.long
def test_the_memory_of_training_grows_in_step_with_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)

        def attend(q, k, v):
            return blockwise(q, k, v, AttentionMask(causal=True), scale=0.2).sum()

        compiled = jax.jit(jax.grad(attend, (0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary(length) for length in (1024, 2048, 4096, 8192)]
    ratios = [after / before for before, after in zip(sizes, sizes[1:], strict=False)]
    assert max(ratios) < 2.2
    assert sizes[-1] < 4 * 8192 * 8192  # bytes of one head's weights
