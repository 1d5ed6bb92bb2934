"""The steps and the memory of the TPU's kernels, by what the compiler is given."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jaxformer.ops.attention import reference, tpu_flash
from jaxformer.ops.attention.kernel import FLASH_RESIDUALS, AttentionSpec, DeviceInfo
from jaxformer.ops.attention.tpu_flash import plan_of
from jaxformer.ops.masks import AttentionMask

V5E = DeviceInfo("tpu", "TPU v5 lite")


def plan(device=V5E, **facts):
    """The plan of a call of 3 heads of 64 with these other facts."""
    sizes = {"batch": 2, "heads": 3, "kv_heads": 3, "key_size": 64, "value_size": 64}
    spec = AttentionSpec(**(sizes | {"dtype": "bfloat16"} | facts))
    return plan_of(spec, device, 0.125)


@pytest.mark.parametrize(
    "length, expected",
    [
        (1000, (1024, 512)),
        (1152, (1280, 256)),
        (640, (640, 128)),
        (128, (128, 128)),
    ],
)
def test_a_length_is_padded_by_an_eighth_at_most_for_larger_blocks(length, expected):
    drawn = plan(queries=length, keys=length)
    assert (drawn.queries, drawn.block_q) == (drawn.keys, drawn.block_k) == expected


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "offset": 256},
    {"causal": True, "offset": -130},
    {"causal": True, "window": 100},
    {"causal": True, "window": 300, "offset": 200},
]


@pytest.mark.parametrize("facts", MASKS, ids=str)
@pytest.mark.parametrize("first_key", [0, 512])
def test_a_step_computes_the_blocks_with_a_visible_key_and_masks_where_one_is_hidden(
    facts, first_key
):
    drawn = plan(queries=1152, keys=1000, **facts)._replace(first_key=first_key)
    drawn = drawn._replace(keys=drawn.keys - first_key)
    mask = AttentionMask(**facts)
    dense = mask.materialize(drawn.queries, drawn.keys + first_key)
    dense = np.ones((drawn.queries, drawn.keys), bool) if dense is None else dense[0, 0]
    dense = np.array(dense[:, -drawn.keys :])
    padded = np.arange(drawn.keys) + first_key >= 1000
    blocks = np.arange(drawn.keys // drawn.block_k)
    for i in range(drawn.grid[2]):
        rows = dense[i * drawn.block_q : (i + 1) * drawn.block_q].reshape(
            drawn.block_q, len(blocks), -1
        )
        visited = [drawn.key_block(i, n) for n in range(drawn.grid[3]) if drawn.sees(i, n)]
        assert visited == list(blocks[rows.any((0, 2))])
        allowed = rows & ~padded.reshape(len(blocks), -1)
        assert [drawn.all_seen(i, j) for j in visited] == list(allowed.all((0, 2))[visited])
        fetched = {drawn.key_block(i, n) for n in range(drawn.grid[3])}
        assert len(fetched) == max(len(visited), 1)  # the last one is not fetched again


def test_the_result_and_the_sums_of_its_rows_can_be_kept(capsys):
    def attend(q):
        return tpu_flash(q, q, q, AttentionMask(causal=True), scale=0.1, interpret=True)

    policy = jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)
    kept = jax.checkpoint(attend, policy=policy)
    print_saved_residuals(lambda q: kept(q).sum(), jnp.ones((2, 256, 4, 64)))
    found = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "output of" in line or "named" in line
    ]
    assert [line.split()[0] for line in found] == ["f32[2,256,256]", "f32[2,2,8,256]"]


def test_a_gradient_of_keys_that_the_chip_cannot_hold_is_computed_in_parts(
    rng, assert_equal, monkeypatch
):
    monkeypatch.setattr(sys.modules[plan_of.__module__], "chip_memory", lambda kind: 2_500_000)
    shapes = (2, 128, 2, 64), (2, 384, 1, 64), (2, 384, 1, 64)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    mask = AttentionMask(causal=True, offset=250, padding_mask=rng.random((2, 384)) < 0.9)

    def gradients(attention_fn, **options):
        def total(q, k, v):
            return jnp.sum(attention_fn(q, k, v, mask, scale=0.1, **options) ** 2)

        traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(*arrays)
        return str(traced.jaxpr), traced.lower().compile()(*arrays)

    text, found = gradients(tpu_flash, interpret=True)
    assert text.count("name=tpu_flash_bwd") == 3
    for given, expected in zip(found, gradients(reference)[1], strict=True):
        assert_equal(given, expected)


def test_each_part_of_a_block_has_its_own_positions(rng, assert_equal):
    mask = AttentionMask(causal=True, window=150)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1000, 2, 64)), jnp.float32) for _ in range(3))
    drawn = plan(heads=2, kv_heads=2, queries=1000, keys=1000, dtype="float32", causal=True)
    assert drawn.block_q > 128 and drawn.block_k > 128

    @jax.jit
    def both(*qkv):
        found = tpu_flash(*qkv, mask, scale=0.1, interpret=True)
        return found, reference(*qkv, mask, scale=0.1)

    assert_equal(*both(q, k, v))
