"""The blocks of splash attention, and queries that have no key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxformer.ops.attention import reference, tpu_flash, tpu_splash
from jaxformer.ops.attention.spec import FLASH_RESIDUALS, AttentionSpec
from jaxformer.ops.attention.tpu_splash import each_query_has_a_key
from jaxformer.ops.masks import AttentionMask


def pallas_calls(jaxpr):
    """The equations of all Pallas calls in `jaxpr`, the inner ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from pallas_calls(getattr(value, "jaxpr", value))


def block_lengths(equation, names):
    """The block lengths [L, H] of the first inputs of a Pallas call, which `names` calls."""
    mappings = equation.params["grid_mapping"].block_mappings
    return {
        name: [size.block_size for size in mapping.block_shape if hasattr(size, "block_size")][0]
        for name, mapping in zip(names, mappings, strict=False)
    }


@pytest.mark.parametrize(
    "kind, queries, keys, expected",
    [
        ("TPU v6 lite", 3072, 1536, {"q": 1024, "k": 512, "v": 512}),
        ("TPU v5 lite", 3072, 1536, {"q": 512, "k": 512, "v": 512}),
        ("TPU v6 lite", 640, 768, {"q": 128, "k": 256, "v": 256}),
    ],
)
def test_a_block_is_as_long_as_chip_and_length_allow_in_every_kernel(kind, queries, keys, expected):
    mesh = jax.sharding.Mesh(np.array([jax.devices()[0]]), "data").abstract_mesh
    mesh = mesh.update(abstract_device=jax.sharding.AbstractDevice(kind, 1, "tpu"))
    q, k = (jax.ShapeDtypeStruct((2, size, 3, 64), jnp.bfloat16) for size in (queries, keys))

    def total(q, k, v):
        return tpu_splash(q, k, v, AttentionMask(), scale=0.1).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, k)
    found = [block_lengths(equation, "qkv") for equation in pallas_calls(jaxpr.jaxpr)]
    assert found == [expected] * 3  # forward, the gradient of q, the gradients of k and v


@pytest.mark.parametrize(
    "attention_fn, shapes",
    [
        (tpu_splash, ["f32[2,4,256,64]", "f32[2,4,256]"]),
        (tpu_flash, ["f32[2,256,256]", "f32[2,2,8,256]"]),
    ],
)
def test_the_result_and_the_sums_of_its_rows_can_be_kept(attention_fn, shapes, capsys):
    def attend(q):
        return attention_fn(q, q, q, AttentionMask(causal=True), scale=0.1, interpret=True)

    policy = jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)
    kept = jax.checkpoint(attend, policy=policy)
    print_saved_residuals(lambda q: kept(q).sum(), jnp.ones((2, 256, 4, 64)))
    found = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "output of" in line or "named" in line
    ]
    assert [line.split()[0] for line in found] == shapes


T, S = 5, 7
SEGMENTS = np.array([[1, 1, 2, 2, 3], [4, 4, 4, 4, 4]])
OTHERS = np.array([[1, 1, 1, 2, 2, 2, 2], [4, 4, 5, 5, 5, 5, 5]])  # query 4 of row 0 has no key
SELF = {"query_segments": SEGMENTS, "key_segments": SEGMENTS}
CROSS = {"query_segments": SEGMENTS, "key_segments": OTHERS}

# The mask, S, and whether the function knows that each query has a key.
KNOWN = {
    "all": (AttentionMask(), S, True),
    "causal": (AttentionMask(causal=True), S, True),
    "causal, fewer keys": (AttentionMask(causal=True), 3, True),
    "later": (AttentionMask(causal=True, offset=2), S, True),
    "before the first key": (AttentionMask(causal=True, offset=-1), S, False),
    "window": (AttentionMask(causal=True, window=1), T, True),
    "window at the last key": (AttentionMask(causal=True, window=3, offset=4), S, True),
    "window after the last key": (AttentionMask(causal=True, window=3, offset=5), S, False),
    "padding": (AttentionMask(padding_mask=np.arange(S) < np.array([[S], [0]])), S, False),
    "segments of one sequence": (AttentionMask(**SELF), T, True),
    "causal segments of one sequence": (AttentionMask(causal=True, **SELF), T, True),
    "causal segments, shifted": (AttentionMask(causal=True, offset=-1, **SELF), T, False),
    "segments of two sequences": (AttentionMask(**CROSS), S, False),
}


@pytest.mark.parametrize("mask, keys, known", KNOWN.values(), ids=KNOWN)
def test_that_each_query_has_a_key_is_known_where_it_is_true(mask, keys, known):
    x = np.zeros((2, T, 1, 4), np.float32), np.zeros((2, keys, 1, 4), np.float32)
    spec = AttentionSpec.create(x[0], x[1], x[1], mask, None, None)
    dense = mask.materialize(T, keys)
    assert each_query_has_a_key(mask, spec) == known
    assert known == (dense is None or bool(dense.any(-1).all()))


def test_segments_that_are_only_equal_are_looked_at():
    mask = AttentionMask(query_segments=SEGMENTS, key_segments=SEGMENTS.copy())
    x = np.zeros((2, T, 1, 4), np.float32)
    assert not each_query_has_a_key(mask, AttentionSpec.create(x, x, x, mask, None, None))


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(causal=True, offset=-3),
        AttentionMask(causal=True, window=5, offset=9),
        AttentionMask(padding_mask=np.array([[True] * 128, [False] * 128])),
        AttentionMask(
            query_segments=np.arange(128)[None] // [[50], [90]], key_segments=np.ones((2, 128), int)
        ),
    ],
    ids=["before the keys", "after the keys", "padding", "segments"],
)
def test_a_query_without_keys_gets_zeros(mask, rng, assert_equal):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 128, 1, 8)), jnp.float32) for _ in range(3))
    expected = np.asarray(reference(q, k, v, mask, scale=0.5))
    empty = np.all(expected == 0, axis=(2, 3))
    assert 0 < empty.sum() < empty.size
    out = jax.jit(lambda q, k, v: tpu_splash(q, k, v, mask, scale=0.5, interpret=True))(q, k, v)
    assert_equal(out, expected)
    assert np.all(np.asarray(out)[empty] == 0)
