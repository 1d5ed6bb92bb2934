"""`dense` agrees with its plain twin `jnp.tensordot`."""

import math
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TransformerConfig
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops.attention import blockwise, reference
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.ops.dense import (
    add_bias,
    dense,
    int8_matmul,
    logits_matmul,
    matmul,
    padded_matmul,
    quantize_matrix,
)
from jaxformer.ops.masks import AttentionMask


@pytest.mark.parametrize(
    ("x", "kernel", "count"),
    [
        ((2, 3, 5), (5, 7), 1),
        ((2, 3, 5), (5, 7, 11), 1),
        ((2, 3, 5, 7), (5, 7, 11), 2),
        ((5,), (5, 7), 1),
        ((1, 1, 12), (12, 7), 1),
        ((1, 1, 12), (12, 3, 5), 1),
        ((1, 1, 3, 4), (3, 4, 7), 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_the_plain_twin(rng, assert_equal, x, kernel, count, dtype):
    x, kernel = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in (x, kernel))

    def outcome(way, x, kernel):
        found, pull = jax.vjp(lambda x, kernel: way(x, kernel, count), x, kernel)
        assert found.dtype == dtype
        return found, *pull(jnp.cos(found))

    ways = dense, jnp.tensordot
    both = jax.jit(lambda *inputs: [outcome(way, *inputs) for way in ways])
    for given, expected in zip(*both(x, kernel), strict=True):
        assert_equal(given, expected, 1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 11])
def test_more_rows_for_the_matrix_unit_change_no_product(rng, assert_equal, choose_platform, rows):
    x, matrix = rng.standard_normal((2, rows, 5)), rng.standard_normal((2, 5, 3))
    assert_equal(jax.jit(padded_matmul)(x, matrix), x @ matrix, 1e-6)
    choose_platform("cuda")
    assert_equal(jax.jit(lambda x: matmul(x, matrix))(x), x @ matrix, 1e-6)


@pytest.mark.parametrize(
    "multiply",
    [
        dense,
        lambda x, matrix: matmul(x, matrix),
        lambda x, matrix: logits_matmul(x.astype(jnp.bfloat16), matrix),
        lambda x, matrix: reference(*[x[None, :, None]] * 3, AttentionMask(), scale=1.0),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_are_multiplied_as_eight_on_a_tpu_and_one_row_twice_on_a_gpu(multiply, rows):
    traced = jax.jit(multiply).trace(jnp.ones((rows, 12)), jnp.ones((12, 5)))
    found = {}
    for platform in ("tpu", "cuda", "cpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found[platform] = set(re.findall(r"dot_general.*-> tensor<(?:1x1x)?(\d+)x", text))
    assert found["tpu"] == {"8"} and found["cuda"] == {"2" if rows == 1 else "3"}
    assert found["cpu"].isdisjoint({"2", "8"})


def test_on_a_cpu_a_single_vector_is_multiplied_in_four_parts_without_a_copy():
    row, matrix = jnp.ones((1, 1, 12)), jnp.ones((12, 5))
    made = jax.jit(dense).trace(row, matrix)
    text = made.lower(lowering_platforms=("cpu",)).compile().as_text()
    assert re.findall(r"(\S+?)(?:\{\S*)? dot\(", text) == ["f32[4,1,5]"]
    assert "[4,3,5]" in text and not re.search(r"\[4,3,5\]\S* (copy|transpose)\(", text)
    for platform in ("cuda", "tpu"):
        assert "tensor<4x1x5xf32>" not in made.lower(lowering_platforms=(platform,)).as_text()


def test_the_parts_of_a_vector_in_bfloat16_are_added_before_they_are_rounded(rng):
    row, matrix = (
        jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in ((1, 64), (64, 997))
    )
    exact = np.float64(row) @ np.float64(matrix)
    found = np.float64(dense(row, matrix))
    assert np.all(abs(found - exact) <= 1.01 * 2.0**-8 * abs(exact) + 1e-5)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (3, 7, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_logits_and_their_gradients_are_those_of_float32_products(
    rng, assert_equal, choose_platform, monkeypatch, shape, dtype, platform
):
    choose_platform(platform)
    monkeypatch.setattr(sys.modules[dense.__module__], "ALIGNED_ROWS", 4)
    x, matrix = rng.standard_normal(shape), rng.standard_normal((5, 7)).astype(np.float32)
    direction, x = rng.standard_normal((*shape[:-1], 7)).astype(np.float32), x.astype(dtype)

    @jax.jit
    def run(x, matrix, direction):
        found, pull = jax.vjp(logits_matmul, x, matrix)
        return logits_matmul(x, matrix), found, *pull(direction)

    exact_logits, found, dx, d_matrix = run(x, matrix, direction)
    assert found.dtype == exact_logits.dtype == jnp.float32
    exact = np.float64(x), np.float64(matrix.astype(dtype)), np.float64(direction.astype(dtype))
    assert_equal(exact_logits, exact[0] @ exact[1], 1e-6)
    # A loss reads logits that a GPU stores in the type of `x`, from eight rows on.
    is_rounded = (dtype, platform) == ("bfloat16", "cuda") and math.prod(shape[:-1]) >= 8
    stored = np.asarray(exact_logits.astype("bfloat16")) if is_rounded else exact_logits
    assert np.array_equal(found, np.float32(stored))
    assert (dx.dtype, d_matrix.dtype) == (dtype, jnp.float32)
    assert_equal(dx, exact[2] @ exact[1].T, 1e-6 if dtype == "float32" else 0.01)
    rows = exact[0].reshape(-1, 5), exact[2].reshape(-1, 7)
    assert_equal(d_matrix, rows[0].T @ rows[1], 1e-6)


@pytest.mark.parametrize(
    ("ids", "columns"), [(131, {"cuda": 256, "cpu": 131}), (136, {"cuda": 136})]
)
def test_an_odd_number_of_logits_is_multiplied_in_aligned_columns_on_a_gpu_alone(ids, columns):
    def total(x, matrix):
        return jnp.sum(jnp.square(logits_matmul(x, matrix)))

    inputs = jnp.ones((2, 512, 5), "bfloat16"), jnp.ones((5, ids))
    traced = jax.jit(jax.grad(total, (0, 1))).trace(*inputs)
    for platform, width in columns.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"dot_general.*: \((.*)\) -> (.*)", text)
        assert len(products) == 3
        assert all(f"x{width}x" in "".join(types) for types in products)


def test_logits_that_are_equal_in_bfloat16_keep_their_order():
    x = jnp.asarray([[16.0, 1.0, 0.5], [8.0, 0.25, 0.25]], "bfloat16")
    matrix = jnp.asarray([[1.0, 1.0, 1.0], [0.0, 1.0 / 64, 1.0 / 128], [0.0, 0.0, 1.0 / 256]])
    logits = np.asarray(jax.jit(logits_matmul)(x, matrix))
    assert np.unique(np.float32(logits.astype("bfloat16")), axis=1).shape == (2, 1)
    assert logits.argmax(1).tolist() == [1, 1] and logits.argmin(1).tolist() == [0, 0]


def products_with_float32(attention_fn, length=9):
    """The products with an operand in float32 in the gradient of a bfloat16 GPT's loss."""
    config = TransformerConfig(
        vocab_size=23, d_model=8, d_ff=16, num_heads=2, num_decoder_layers=1, dtype="bfloat16"
    )
    model, tokens = DecoderOnly(config, attention_fn), jnp.zeros((2, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens)["params"])

    def total(params):
        logits = model.apply({"params": params}, tokens)
        assert logits.dtype == jnp.float32
        return cross_entropy(logits, tokens, tokens == 0)[0]

    lowered = jax.jit(jax.grad(total)).trace(params).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    operands = re.findall(r"dot_general.*: \((\S+), (\S+)\) ->", text)
    assert len(operands) > 3
    return sum(any(x.endswith("xf32>") for x in pair) for pair in operands)


def test_a_bfloat16_model_multiplies_nothing_in_float32_but_the_gradient_of_the_plain_scores():
    assert products_with_float32(partial(blockwise, block=16)) == 0
    # `reference` differentiates scores that are summed in float32: to the queries and to the keys.
    assert products_with_float32(reference) == 2


def rounded(x, axis):
    """`x` in steps of its largest number along `axis` over 127; zeros stay."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.round(x / scale) * scale


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_in_8_bits_is_that_of_rounded_rows_and_outputs(rows, rng, assert_equal):
    x, matrix = rng.standard_normal((rows, 7), np.float32), rng.standard_normal((11, 7), np.float32)
    x[0, :] = 0 if rows > 1 else x[0]
    stored = quantize_matrix(matrix)
    assert stored.values.dtype == np.int8 and stored.scale.shape == (11,)
    product = jax.jit(lambda x, table: int8_matmul(x, table.T)).lower(x, stored).compile()
    assert_equal(product(x, stored), rounded(x, 1) @ rounded(matrix, 1).T, 1e-6)
    # A copy of the matrix in 32 bits would be made, and read, for each token.
    assert not re.search(r"(s32|f32)\[(7,11|11,7)\]", product.as_text())


def test_rows_taken_from_a_quantized_table_are_the_rounded_ones(rng, assert_equal):
    table = rng.standard_normal((11, 7), np.float32)
    ids = np.array([[3, 0, 10], [5, 3, 3]])
    assert_equal(quantize_matrix(table).rows(ids), rounded(table, 1)[ids], 1e-6)


def partitioned_along(axis):
    """The context of a program that XLA partitions over two devices along `axis`."""
    mesh = jax.sharding.AbstractMesh((2,), (axis,), (jax.sharding.AxisType.Auto,))
    return jax.sharding.use_abstract_mesh(mesh)


def test_a_decoding_step_on_a_mesh_pads_its_products_as_one_device_does():
    kernel = jnp.zeros((13, 7))

    def program(*shape):
        multiply = partial(dense, kernel=kernel)
        return str(jax.make_jaxpr(multiply)(jax.ShapeDtypeStruct(shape, jnp.float32)))

    with partitioned_along("tensor"):
        step, prompt = program(3, 1, 13), program(3, 5, 13)
    assert "f32[8,13]" in step and "platform" in step
    assert "f32[3,5,13]" in prompt and "platform" not in prompt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_gradient_of_a_bias_is_summed_in_float32(
    platform, dtype, shape, rng, assert_equal, choose_platform
):
    choose_platform(platform)
    x, d_out = (jnp.asarray(rng.random((2, 499, *shape)), dtype) for _ in range(2))
    bias = jnp.asarray(rng.standard_normal(shape), jnp.float32)

    @jax.jit
    def run(x, bias, d_out):
        out, pull = jax.vjp(add_bias, x, bias)
        return out, x + bias.astype(dtype)[None, None], *pull(d_out)

    out, plain, dx, d_bias = run(x, bias, d_out)
    assert out.dtype == dtype and np.array_equal(out, plain)
    assert np.array_equal(dx, d_out) and d_bias.dtype == jnp.float32
    assert_equal(d_bias, np.asarray(d_out, np.float64).sum((0, 1)), 1e-5)


def test_a_matrix_along_tensor_is_converted_before_its_product():
    def program(dtype, axis):
        with partitioned_along(axis):
            shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((3, 5, 13), (13, 7)))
            return str(jax.make_jaxpr(dense)(*shapes))

    assert "optimization_barrier" in program("bfloat16", "tensor")
    assert "optimization_barrier" not in program("float32", "tensor")
    assert "optimization_barrier" not in program("bfloat16", "sequence")
