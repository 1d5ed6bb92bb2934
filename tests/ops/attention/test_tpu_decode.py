"""Attention to a cache by a TPU's kernel, which is interpreted, against `reference`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import AttentionSpec, DeviceInfo, choose, reference, tpu_decode
from jaxformer.ops.attention.tpu_decode import Scores, attend_to_cache
from jaxformer.ops.masks import AttentionMask

TPU = DeviceInfo("tpu", "TPU v6 lite")

CALLS = {
    # rows, queries, heads, heads of keys, keys, H, Hv, dtype, window, softcap
    "one query": (5, 1, 6, 3, 300, 16, 24, "float32", None, None),
    "one row": (1, 1, 4, 2, 131, 16, 16, "float32", None, None),
    "several blocks": (3, 1, 6, 2, 2048, 128, 128, "float32", None, None),
    "a last block that is cut": (
        3,
        1,
        2,
        2,
        1031,
        128,
        128,
        "float32",
        None,
        None,
    ),
    "narrow values in blocks": (2, 1, 6, 6, 2309, 48, 40, "float32", None, None),
    "several queries": (3, 7, 6, 2, 301, 16, 16, "float32", None, None),
    "queries in two blocks": (2, 5, 2, 1, 2304, 128, 128, "float32", None, None),
    "a window": (5, 3, 4, 2, 2304, 128, 128, "float32", 150, None),
    "a soft cap": (3, 2, 4, 2, 301, 16, 16, "float32", None, 3.0),
    "16 bits": (3, 1, 8, 2, 2048, 128, 128, "bfloat16", None, None),
    "more heads than a step computes": (2, 1, 34, 34, 256, 128, 128, "float32", None, None),
}


def drawn(rng, call):
    """Queries, keys and values, the mask, the first query of each row at a place of its own."""
    rows, queries, heads, kv_heads, keys, size, value_size, dtype, window, softcap = call
    shapes = (
        (rows, queries, heads, size),
        (rows, keys, kv_heads, size),
        (rows, keys, kv_heads, value_size),
    )
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    offset = rng.integers(0, keys - queries + 1, rows)
    offset[[0, -1]] = 0, keys - queries
    mask = AttentionMask(causal=True, window=window, offset=jnp.asarray(offset), from_cache=True)
    return arrays, mask, {"scale": 0.2, "softcap": softcap}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_tpus_kernel_attends_to_a_cache_as_reference_does(call, rng, assert_equal):
    arrays, mask, options = drawn(rng, call)
    found = tpu_decode(*arrays, mask, interpret=True, **options)
    expected = reference(*(x.astype(jnp.float32) for x in arrays), mask, **options)
    assert found.dtype == arrays[0].dtype
    if arrays[0].dtype == jnp.bfloat16:
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.02)
    else:
        assert_equal(found, expected)


def test_keys_after_the_last_query_are_not_read(rng):
    """Not a number in a block that no query sees changes nothing; 0 x NaN would."""
    arrays, mask, options = drawn(rng, CALLS["several blocks"])
    q, k, v = arrays
    mask = replace(mask, offset=jnp.array([0, 131, 1023]))
    expected = tpu_decode(q, k, v, mask, interpret=True, **options)
    k, v = k.at[:, 1024:].set(jnp.nan), v.at[:, 1024:].set(jnp.nan)
    found = tpu_decode(q, k, v, mask, interpret=True, **options)
    assert np.array_equal(found, expected) and not np.isnan(expected).any()


def test_keys_before_a_window_are_not_read(rng):
    arrays, mask, options = drawn(rng, CALLS["several blocks"])
    q, k, v = arrays
    mask = replace(mask, offset=jnp.array([1531, 1300, 2047]), window=200)
    expected = tpu_decode(q, k, v, mask, interpret=True, **options)
    k, v = k.at[:, :1024].set(jnp.nan), v.at[:, :1024].set(jnp.nan)
    found = tpu_decode(q, k, v, mask, interpret=True, **options)
    assert np.array_equal(found, expected) and not np.isnan(expected).any()


def test_its_gradient_is_that_of_reference(rng, assert_equal):
    arrays, mask, options = drawn(rng, CALLS["several queries"])

    def gradients(attend):
        def total(*arrays):
            return jnp.sum(jnp.sin(attend(*arrays, mask, **options)))

        return jax.jit(jax.grad(total, (0, 1, 2)))(*arrays)

    def by_kernel(*arguments, **options):
        return tpu_decode(*arguments, interpret=True, **options)

    for found, expected in zip(gradients(by_kernel), gradients(reference), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("keys", [301, 2304])
def test_beams_of_a_sentence_see_the_keys_of_a_mask(keys, rng, assert_equal):
    """A beam that sees none gets zeros."""
    shapes = (3, 4, 6, 128), (3, keys, 2, 128), (3, keys, 2, 128)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    explicit = rng.random((3, 4, keys)) < 0.3
    explicit[1, 2] = False
    explicit[2, :, 200:] = False
    offset = jnp.array([7, keys - 1, 0])  # it hides no key from beams
    mask = AttentionMask(explicit=jnp.asarray(explicit), offset=offset, from_cache=True)
    found = tpu_decode(*arrays, mask, scale=0.2, interpret=True)
    assert_equal(found, reference(*arrays, mask, scale=0.2))
    assert not np.any(found[1, 2]) and np.any(found[1, 1])


SPEC = AttentionSpec(
    batch=3,
    queries=1,
    keys=301,
    heads=6,
    kv_heads=2,
    key_size=16,
    value_size=16,
    dtype="bfloat16",
    causal=True,
    offset=None,
    from_cache=True,
)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "tpu_decode"),
        ({"window": 5, "softcap": 3.0, "queries": 7}, "tpu_decode"),
        ({"queries": 22}, "reference"),
        ({"from_cache": False}, "reference"),
        ({"queries": 8, "explicit": True, "causal": False}, "tpu_decode"),
        ({"padding_mask": True}, "reference"),
        ({"bias": True}, "reference"),
        ({"dtype": "float16"}, "reference"),
    ],
    ids=str,
)
def test_it_is_chosen_on_a_tpu_for_few_queries_and_a_cache(facts, name):
    assert choose(replace(SPEC, **facts), TPU).name == name
    assert choose(replace(SPEC, **facts), DeviceInfo("cpu")).name == "reference"


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((2, 2), "tpu_decode"),
        ((2, 3), "reference"),
        ((3, 1, 2), "tpu_decode"),
        ((1, 2, 2), "reference"),
    ],
)
def test_heads_that_a_mesh_does_not_divide_are_left_to_reference(sizes, name):
    axes = ("data", "tensor", "sequence")[: len(sizes)]
    mesh = jax.sharding.AbstractMesh(sizes, axes, (jax.sharding.AxisType.Auto,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose(SPEC, TPU).name == name


def test_a_program_for_a_tpu_has_the_kernel_and_no_scores():
    shapes = (5, 2, 8, 128), (5, 2, 128, 1024), (5, 2, 1024, 128), (5,)
    types = jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.int32
    arrays = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, types, strict=True)]

    attend = partial(attend_to_cache, Scores(queries=1, scale=0.1))
    text = jax.jit(attend).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1 and "5x2x8x1024" not in text
