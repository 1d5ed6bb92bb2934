from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Rotary, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops import attention
from jaxformer.ops.masks import AttentionMask

pytestmark = pytest.mark.usefixtures("optimized")

B, T, S, N, K, H = 3, 5, 7, 6, 2, 4
DEVICES = "cudnn", "gpu_flash", "tpu_flash"
EVERYWHERE = ("reference", "blockwise")

VALID = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], bool)
QUERY_SEGMENTS = np.array([[1, 1, 1, 2, 2], [1, 2, 3, 3, 4], [1, 1, 1, 1, 1]])
KEY_SEGMENTS = np.array(
    [[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 3, 3, 3, 5], [2, 2, 2, 2, 2, 2, 2]]
)  # query 4 of row 1 and all of row 2 have no key
EXPLICIT = np.random.default_rng(1).random((B, T, S)) < 0.5
EXPLICIT[1, 2] = False
DIAGONAL = np.eye(T, S, 1, dtype=bool)
SEGMENTS = {"query_segments": QUERY_SEGMENTS, "key_segments": KEY_SEGMENTS}

MASKS = {
    "all": AttentionMask(),
    "padding": AttentionMask(padding_mask=VALID),
    "segments": AttentionMask(**SEGMENTS),
    "window": AttentionMask(causal=True, offset=2, window=3),
    "explicit": AttentionMask(explicit=EXPLICIT),
    "everything": AttentionMask(
        causal=True,
        offset=1,
        window=4,
        padding_mask=VALID,
        **SEGMENTS,
        explicit=EXPLICIT | DIAGONAL,
    ),
}


class Inputs:
    """Random q, k, v, and the direction in which the output is differentiated."""

    def __init__(self, rng: np.random.Generator):
        queries, keys = (B, T, N, H), (B, S, K, H)
        self.q, self.k, self.v, self.direction = (
            rng.standard_normal(shape, np.float32) for shape in (queries, keys, keys, queries)
        )


def may_attend(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    distance = mask.offset + query - key
    return bool(
        (not mask.causal or distance >= 0)
        and (mask.window is None or distance < mask.window)
        and (mask.padding_mask is None or mask.padding_mask[row, key])
        and (
            mask.query_segments is None
            or mask.query_segments[row, query] == mask.key_segments[row, key]
        )
        and (mask.explicit is None or mask.explicit[row, query, key])
    )


def by_hand(q, k, v, mask, scale) -> np.ndarray:
    """Attention in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for row, query, head in np.ndindex(*q.shape[:3]):
        group = head * k.shape[2] // q.shape[2]
        seen = [key for key in range(k.shape[1]) if may_attend(mask, row, query, key)]
        logits = k[row, seen, group] @ q[row, query, head] * scale
        weights = np.exp(logits - logits.max(initial=-np.inf))
        out[row, query, head] = (weights / weights.sum()) @ v[row, seen, group] if seen else 0.0
    return out


@partial(jax.jit, static_argnames="attention_fn")
def output_and_gradients(attention_fn, inputs, direction, mask):
    def total(inputs):
        out = attention.ATTENTION_FNS[attention_fn](*inputs, mask, scale=0.5)
        return jnp.sum(out * direction), out

    return jax.value_and_grad(total, has_aux=True)(inputs)


def run(attention_fn, x: Inputs, mask):
    (_, out), gradients = output_and_gradients(attention_fn, (x.q, x.k, x.v), x.direction, mask)
    return np.asarray(out), [np.asarray(leaf) for leaf in gradients]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_every_attention_function_is_the_formula_under_every_mask(mask, rng, assert_equal):
    x = Inputs(rng)
    expected = by_hand(x.q, x.k, x.v, mask, 0.5)
    _, expected_gradients = run("reference", x, mask)
    for attention_fn in EVERYWHERE:
        out, gradients = run(attention_fn, x, mask)
        assert_equal(out, expected)
        for gradient, wanted in zip(gradients, expected_gradients, strict=True):
            assert_equal(gradient, wanted)


@pytest.mark.parametrize("attention_fn", EVERYWHERE)
def test_a_query_without_keys_yields_zeros_and_finite_gradients(attention_fn, rng):
    x = Inputs(rng)
    mask = MASKS["everything"]
    out, gradients = run(attention_fn, x, mask)
    assert np.all(out[1, 4] == 0) and np.all(out[2] == 0)
    assert np.abs(out[0]).min() > 0
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert all(np.all(gradient[2] == 0) for gradient in gradients)


@pytest.mark.parametrize(
    "attention_fn", [attention.ATTENTION_FNS[name] for name in ("auto", *DEVICES)]
)
def test_a_bool_array_as_mask_is_refused(attention_fn, rng):
    x = Inputs(rng)
    with pytest.raises(ConfigError, match=r"mask is a .* give AttentionMask\(explicit=array\)"):
        attention_fn(x.q, x.k, x.v, EXPLICIT, scale=0.5)


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_a_model_built_with_flash_attention_decodes_with_a_cache(
    name, rng, random_params, assert_equal
):
    config = TransformerConfig(
        vocab_size=23, d_model=8, d_ff=16, num_heads=2, num_decoder_layers=2, positions=Rotary()
    )
    prompt, parents = rng.integers(0, 23, (2, 1, 5)), np.array([[0, 0, 0], [0, 0, 0]])
    tokens = rng.integers(0, 23, (2, 3, 1))
    params = random_params(DecoderOnly(config), prompt[:, 0])

    def decoded(attention_fn):
        model = DecoderOnly(config, attention_fn)

        @jax.jit
        def run(params):
            run = partial(model.apply, {"params": params})
            cache = run(2, max_length=11, method="init_cache")
            first, cache = run(prompt, cache, method="decode_step")
            cache = cache.reorder_beams(parents)
            second, cache = run(tokens, cache, method="decode_step")
            return first, second

        return run(params)

    for given, expected in zip(
        decoded(attention.ATTENTION_FNS[name]), decoded(attention.reference), strict=True
    ):
        assert_equal(given, expected)
