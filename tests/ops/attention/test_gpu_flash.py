"""The kernels of `gpu_flash`, interpreted on a CPU, against `reference`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import AttentionSpec, gpu_flash, reference
from jaxformer.ops.attention.gpu_flash import block_bounds, make_mask_arrays, make_plan
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

flash = partial(gpu_flash, interpret=True)


def outcome(attention_fn, q, k, v, mask, rate=0.0, name="weights"):
    """The result, and the gradients of q, k and v in a direction that is the same for all."""
    dropout_rng = DropoutRng(jax.random.key(5), jnp.arange(q.shape[0]) + 3)
    direction = np.random.default_rng(7).standard_normal((*q.shape[:3], v.shape[3]), np.float32)

    def total(q, k, v):
        dropout = DropoutMask(dropout_rng, name, rate) if rate else None
        out = attention_fn(q, k, v, mask, scale=0.6, dropout=dropout)
        return jnp.sum(out * direction), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def drawn(rng, lengths, heads, sizes, dtype="float32"):
    shapes = (lengths[0], heads[0], sizes[0]), (lengths[1], heads[1], sizes[0])
    shapes = *shapes, (lengths[1], heads[1], sizes[1])
    return tuple(jnp.asarray(rng.standard_normal((2, *shape)), dtype) for shape in shapes)


def packed(*lengths):
    """Documents of different lengths in each of two rows, the last one to the end."""
    numbers = [np.repeat(np.arange(2), (length // 3, length - length // 3)) for length in lengths]
    others = [np.repeat(np.arange(3), (5, length - 11, 6)) for length in lengths]
    names = ("query_segments", "key_segments")
    return dict(zip(names, map(np.stack, zip(numbers, others, strict=True)), strict=True))


CASES = {
    # lengths, heads, sizes, mask, dropout rate; lengths are no multiples of the blocks
    "packed": ((75, 75), (6, 2), (8, 5), AttentionMask(causal=True, **packed(75, 75)), 0.3),
    "all": ((17, 41), (3, 3), (8, 5), AttentionMask(), 0.0),
    "window": ((41, 75), (4, 1), (5, 8), AttentionMask(causal=True, offset=30, window=17), 0.3),
    "padding": (
        (37, 37),
        (3, 3),
        (8, 8),
        AttentionMask(causal=True, padding_mask=np.array([[True] * 37, [False] * 9 + [True] * 28])),
        0.0,
    ),
    "before the first key": ((37, 19), (2, 1), (8, 8), AttentionMask(causal=True, offset=-7), 0.3),
}


@pytest.mark.parametrize(
    "lengths, heads, sizes, mask, rate",
    [
        pytest.param(*case, id=name, marks=() if name == "packed" else pytest.mark.long)
        for name, case in CASES.items()
    ],
)
def test_result_and_gradients_are_those_of_reference(
    lengths, heads, sizes, mask, rate, rng, assert_equal
):
    x = drawn(rng, lengths, heads, sizes)
    for given, expected in zip(
        outcome(flash, *x, mask, rate), outcome(reference, *x, mask, rate), strict=True
    ):
        assert_equal(given, expected)


def test_a_traced_offset_is_an_offset(rng, assert_equal):
    x = drawn(rng, (17, 41), (2, 1), (8, 8))
    attend = jax.jit(lambda offset: flash(*x, AttentionMask(causal=True, offset=offset), scale=0.6))
    for offset in (0, 24):
        mask = AttentionMask(causal=True, offset=offset)
        assert_equal(attend(offset), jax.jit(partial(reference, scale=0.6))(*x, mask))


def test_the_types_of_results_and_gradients_are_those_of_the_arguments(rng):
    x = drawn(rng, (37, 37), (2, 1), (8, 5), "bfloat16")
    given = jax.eval_shape(partial(outcome, flash, mask=AttentionMask(causal=True)), *x)
    expected = jax.eval_shape(partial(outcome, reference, mask=AttentionMask(causal=True)), *x)
    assert given == expected


MASKS = {
    "packed": (AttentionMask(causal=True, **packed(128, 128)), 62),
    "window": (AttentionMask(causal=True, offset=3, window=18), 44),
    "all": (AttentionMask(), 128),
}


@pytest.mark.parametrize("mask, visited", MASKS.values(), ids=MASKS)
def test_only_blocks_in_which_a_query_may_see_a_key_are_visited(mask, visited):
    x = jax.ShapeDtypeStruct((2, 128, 1, 8), jnp.float32)
    spec = AttentionSpec.create(x, x, x, mask, None, None)
    plan = make_plan(spec, 1.0, True)

    @jax.jit
    def run():
        bounds = block_bounds(plan, make_mask_arrays(plan, mask, spec), 16, 16)
        return bounds, mask.materialize(128, 128)

    bounds, dense = run()
    bounds = np.asarray(bounds)
    dense = np.ones((1, 1, 128, 128), bool) if dense is None else np.asarray(dense)
    dense = np.broadcast_to(dense, (2, 1, 128, 128)).reshape(2, 8, 16, 8, 16).any((2, 4))
    inside = np.arange(8) >= bounds[..., :1]
    inside &= np.arange(8) < bounds[..., 1:]
    assert np.array_equal(inside, dense) and inside.sum() == visited
