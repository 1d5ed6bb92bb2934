"""Products of rows with the matrices of their groups, by a TPU's kernels, which are interpreted."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.grouped_product import grouped_product, multiply_by_kernel

CALLS = {
    # rows of each group, rows of none, inputs, outputs, dtype
    "groups of unequal sizes": ((5, 0, 11, 3), 0, 13, 7, "float32"),
    "tiles that several groups share": ((2, 1, 1, 2, 1), 6, 17, 5, "float32"),
    "many tiles of rows": ((131, 7), 59, 11, 19, "float32"),
    "numbers of 16 bits": ((23, 41), 3, 29, 31, "bfloat16"),
    "matrices of several tiles": ((19, 31), 0, 1031, 1061, "float32"),
    "no group has a row": ((0, 0, 0), 5, 3, 7, "float32"),
}


def drawn(rng, sizes, others, inputs, outputs, dtype):
    rows = rng.standard_normal((sum(sizes) + others, inputs))
    matrices = rng.standard_normal((len(sizes), inputs, outputs)) / inputs**0.5
    return jnp.asarray(rows, dtype), jnp.asarray(matrices, dtype), jnp.asarray(sizes, jnp.int32)


def plain_product(rows, matrices, sizes):
    """Group by group; rows of none are zeros."""
    ends = np.cumsum(sizes)
    parts = [rows[e - n : e] @ m for e, n, m in zip(ends, sizes, matrices, strict=True)]
    return jnp.concatenate([*parts, jnp.zeros((len(rows) - ends[-1], matrices.shape[2]))])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tpus_kernels_compute_the_product_of_each_group_and_its_gradients(call, rng):
    rows, matrices, sizes = drawn(rng, *call)
    weights = jnp.asarray(rng.standard_normal((len(rows), matrices.shape[2])), jnp.float32)

    def out_and_slopes(multiply, rows, matrices):
        def total(rows, matrices):
            out = multiply(rows, matrices)
            return jnp.sum(weights * out), out

        return jax.value_and_grad(total, (0, 1), has_aux=True)(rows, matrices)

    def by_kernel(rows, matrices):
        return multiply_by_kernel(True, rows, matrices, sizes)

    def plainly(rows, matrices):
        return plain_product(rows, matrices, call[0])

    (_, out), slopes = out_and_slopes(by_kernel, rows, matrices)
    exact = [x.astype(jnp.float32) for x in (rows, matrices)]
    (_, right), right_slopes = out_and_slopes(plainly, *exact)
    near = 2e-2 if call[-1] == "bfloat16" else 2e-5
    for given, wanted in zip((out, *slopes), (right, *right_slopes), strict=True):
        assert given.dtype == rows.dtype and given.shape == wanted.shape
        scale = max(float(jnp.abs(wanted).max()), 1.0)
        np.testing.assert_allclose(np.float32(given), wanted, atol=near * scale)


def test_a_product_with_types_of_varying_axes_is_left_to_xla(rng):
    rows, matrices, sizes = drawn(rng, *CALLS["groups of unequal sizes"])
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(
        grouped_product, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True
    )
    expected = plain_product(rows, matrices, CALLS["groups of unequal sizes"][0])
    np.testing.assert_allclose(mapped(rows, matrices, sizes), expected, atol=1e-5)


def program_for_a_tpu(rng):
    """The lowered gradient of a product of 16-bit numbers."""
    arrays = drawn(rng, *CALLS["numbers of 16 bits"])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    def total(rows, matrices, sizes):
        return jnp.sum(grouped_product(rows, matrices, sizes).astype(jnp.float32) ** 2)

    mesh = jax.sharding.Mesh(np.array([jax.devices()[0]]), "data").abstract_mesh
    tpu = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=tpu)):
        traced = jax.jit(jax.grad(total, (0, 1))).trace(*shapes)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_program_for_a_tpu_has_three_kernels_and_no_ragged_product(rng):
    text = program_for_a_tpu(rng)
    assert text.count("tpu_custom_call") == 3 and "ragged_dot" not in text


def test_without_the_kernels_a_tpu_computes_the_ragged_product(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu.megablox.gmm", None)
    text = program_for_a_tpu(rng)
    assert "tpu_custom_call" not in text and "ragged_dot" in text
