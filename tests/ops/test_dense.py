"""`dense_dot_general` agrees with its plain twin `jax.lax.dot_general`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.dense import dense_dot_general, flat_matmul

ONE = (((2,), (0,)), ((), ()))
TWO = (((2, 3), (0, 1)), ((), ()))


@pytest.mark.parametrize(
    ("x", "kernel", "axes"),
    [
        ((2, 3, 5), (5, 7), ONE),
        ((2, 3, 5), (5, 7, 11), ONE),
        ((2, 3, 5, 7), (5, 7, 11), TWO),
        ((5,), (5, 7), (((0,), (0,)), ((), ()))),
        ((1, 1, 12), (12, 7), ONE),
        ((1, 1, 12), (12, 3, 5), ONE),
        ((1, 1, 3, 4), (3, 4, 7), TWO),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_the_plain_twin(rng, assert_equal, x, kernel, axes, dtype):
    x, kernel = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in (x, kernel))

    def outcome(way):
        found, pull = jax.vjp(lambda x, kernel: way(x, kernel, axes), x, kernel)
        assert found.dtype == dtype
        return found, *pull(jnp.cos(found))

    for given, expected in zip(
        outcome(dense_dot_general), outcome(jax.lax.dot_general), strict=True
    ):
        assert_equal(given, expected, 1e-5 if dtype == "float32" else 0.02)


def test_on_a_cpu_a_single_vector_is_multiplied_in_four_parts_without_a_copy():
    row, matrix = jnp.ones((1, 1, 12)), jnp.ones((12, 5))
    made = jax.jit(lambda x, kernel: dense_dot_general(x, kernel, ONE)).trace(row, matrix)
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
    found = np.float64(dense_dot_general(row, matrix, (((1,), (0,)), ((), ()))))
    assert np.all(abs(found - exact) <= 1.01 * 2.0**-8 * abs(exact) + 1e-5)


@pytest.mark.parametrize(
    "axes",
    [
        (((1,), (0,)), ((), ())),
        (((2,), (1,)), ((), ())),
        (((2,), (0,)), ((1,), (1,))),
        (((3, 2), (0, 1)), ((), ())),
    ],
)
def test_other_axes_are_refused(axes):
    x, kernel = np.zeros((2, 3, 5, 5)[: 4 if len(axes[0][0]) > 1 else 3]), np.zeros((5, 5, 7))
    with pytest.raises(ValueError, match=r"only the last axes of x with the first .*dot_general"):
        dense_dot_general(x, kernel, axes)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_a_product_of_flat_rows_is_the_product(rng, assert_equal, shape):
    x, matrix = (rng.standard_normal(size, np.float32) for size in (shape, (5, 7)))
    assert_equal(jax.jit(flat_matmul)(x, matrix), x @ matrix, 1e-6)
