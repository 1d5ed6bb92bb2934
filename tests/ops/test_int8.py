"""Products in 8 bits against the same products in float."""

import jax
import numpy as np
import pytest

from jaxformer.ops.dense import int8_matmul, quantize_matrix, take_rows


def rounded(x, axis):
    """`x` in steps of its largest number along `axis` over 127; zeros stay."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.round(x / scale) * scale


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_in_8_bits_is_that_of_rounded_rows_and_outputs(rows, inputs, rng, assert_equal):
    x, matrix = rng.standard_normal((rows, 7), np.float32), rng.standard_normal((7, 11), np.float32)
    x[0, :] = 0 if rows > 1 else x[0]
    stored = quantize_matrix(matrix if inputs == 0 else matrix.T, inputs)
    assert stored.values.dtype == np.int8 and stored.scale.shape == (11,)
    assert_equal(jax.jit(int8_matmul)(x, stored), rounded(x, 1) @ rounded(matrix, 0), 1e-6)


def test_rows_taken_from_a_quantized_table_are_the_rounded_ones(rng, assert_equal):
    table = rng.standard_normal((11, 7), np.float32)
    ids = np.array([[3, 0, 10], [5, 3, 3]])
    assert_equal(take_rows(quantize_matrix(table, 1), ids), rounded(table, 1)[ids], 1e-6)
