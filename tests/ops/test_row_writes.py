"""Positions of rows, written by a TPU's kernel, which is interpreted, and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.row_writes import write_plainly, write_rows, write_tiles

CALLS = {
    # rows, heads, H, length, Hv, new positions, dtype
    "one position": (5, 2, 16, 300, 24, 1, "bfloat16"),
    "a cache shorter than a tile": (3, 2, 8, 29, 8, 1, "float32"),
    "more rows than a tile of new columns": (131, 1, 8, 256, 8, 1, "bfloat16"),
    "slots that two tiles hold": (3, 2, 16, 257, 24, 5, "float32"),
    "many positions": (2, 3, 8, 400, 8, 50, "float32"),
    "more heads than a step writes": (2, 6, 700, 140, 8, 2, "float32"),
    "heads as wide as the lanes": (3, 2, 128, 300, 128, 1, "bfloat16"),
    "wide heads in slots that two tiles hold": (3, 2, 16, 257, 256, 5, "float32"),
}


def drawn(rng, rows, heads, size, length, value_size, count, dtype):
    shapes = (
        (rows, heads, size, length),
        (rows, heads, length, value_size),
        (rows, heads, size, count),
        (rows, heads, count, value_size),
    )
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    # From the last one they do not fit.
    start = rng.integers(0, length - count + 1, rows)
    start[[0, -1]] = 0, length
    return *arrays, jnp.asarray(start, jnp.int32)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tpus_kernel_writes_what_xla_writes_bit_for_bit(call, rng):
    arrays = drawn(rng, *call)
    expected = jax.jit(write_plainly)(*arrays)
    for given, right in zip(write_tiles(*arrays, interpret=True), expected, strict=True):
        assert given.dtype == right.dtype
        assert np.array_equal(np.asarray(given, np.float32), np.asarray(right, np.float32))


def test_what_is_not_a_number_stays_where_it_is_written(rng):
    key, value, new_key, new_value, start = drawn(rng, *CALLS["slots that two tiles hold"])
    new_key, new_value = new_key.at[1, 0, 3, 2].set(jnp.nan), new_value.at[2, 1, 0].set(jnp.inf)
    arrays = key, value, new_key, new_value, start
    expected = write_plainly(*arrays)
    for given, right in zip(write_tiles(*arrays, interpret=True), expected, strict=True):
        assert np.array_equal(given, right, equal_nan=True)


def test_the_gradient_of_what_is_written_over_is_zero(rng, assert_equal):
    key, value, new_key, new_value, start = drawn(rng, 3, 2, 4, 7, 5, 1, "float32")

    def total(key, value, new_key, new_value):
        written = write_rows(key, value, new_key, new_value, start)
        return sum(jnp.sum(x**2) for x in written)

    slopes = jax.grad(total, (0, 2))(key, value, new_key, new_value)
    assert_equal(slopes[1], 2 * new_key)
    places = jnp.clip(start, 0, 6)
    assert not np.any(jnp.take_along_axis(slopes[0], places[:, None, None, None], axis=3))


def test_a_program_for_a_tpu_has_the_kernel_and_no_loop(rng):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn(rng, *CALLS["one position"])]
    mesh = jax.sharding.Mesh(np.array([jax.devices()[0]]), "data").abstract_mesh
    tpu = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=tpu)):
        traced = jax.jit(write_rows).trace(*arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1 and "while" not in text and "scatter" not in text
    plain = jax.jit(write_rows).trace(*arrays).lower(lowering_platforms=("cpu",)).as_text()
    assert "tpu_custom_call" not in plain and "scatter" in plain
