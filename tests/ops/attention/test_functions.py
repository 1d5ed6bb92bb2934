import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Alibi, Places, Rotary, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops import attention
from jaxformer.ops.attention.reference import query_key_products, weighted_values
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import AttentionMask

pytestmark = pytest.mark.usefixtures("optimized")

B, T, S, N, K, H = 3, 5, 7, 6, 2, 4
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
    "causal": AttentionMask(causal=True),
    "causal at an offset": AttentionMask(causal=True, offset=2),
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


@dataclass
class Inputs:
    """Random q, k, v, and the direction in which the output is differentiated."""

    rng: np.random.Generator
    value_size: int = H
    q: np.ndarray = field(init=False)

    def __post_init__(self):
        self.q = self.rng.standard_normal((B, T, N, H), np.float32)
        self.k = self.rng.standard_normal((B, S, K, H), np.float32)
        self.v = self.rng.standard_normal((B, S, K, self.value_size), np.float32)
        self.direction = self.rng.standard_normal((B, T, N, self.value_size), np.float32)


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


def by_hand(q, k, v, mask, scale, bias=None) -> np.ndarray:
    """Attention in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for row, query, head in np.ndindex(*q.shape[:3]):
        group = head * k.shape[2] // q.shape[2]
        seen = [key for key in range(k.shape[1]) if may_attend(mask, row, query, key)]
        logits = k[row, seen, group] @ q[row, query, head] * scale
        if bias is not None:
            logits = logits + np.asarray(bias, np.float64)[0, head, query, seen]
        weights = np.exp(logits - logits.max(initial=-np.inf))
        out[row, query, head] = (weights / weights.sum()) @ v[row, seen, group] if seen else 0.0
    return out


@partial(jax.jit, static_argnames=("attention_fn", "scale"))
def output_and_gradients(attention_fn, inputs, direction, mask, scale=0.5, bias=None):
    def total(inputs):
        out = attention.get(attention_fn)(*inputs, mask, scale=scale, bias=bias)
        return jnp.sum(out * direction), out

    return jax.value_and_grad(total, has_aux=True)(inputs)


def run(attention_fn, x: Inputs, mask, **settings):
    (_, out), gradients = output_and_gradients(
        attention_fn, (x.q, x.k, x.v), x.direction, mask, **settings
    )
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


@pytest.mark.parametrize("attention_fn", EVERYWHERE)
def test_a_bias_is_added_to_the_scaled_logits(attention_fn, rng, assert_equal):
    x = Inputs(rng)
    places = np.arange(T) + 2
    bias = np.asarray(Alibi().bias(Places(places, places, length=S, num_heads=N), {}))
    mask = MASKS["causal at an offset"]
    out, _ = run(attention_fn, x, mask, bias=bias, scale=0.25)
    assert_equal(out, by_hand(x.q, x.k, x.v, mask, 0.25, bias))


@pytest.mark.parametrize("attention_fn", EVERYWHERE)
def test_two_keys_one_apart_weigh_one_to_e(attention_fn):
    q = np.ones((2, 1, 1, 1), np.float32)
    k = np.float32([0, 1]).reshape(1, 2, 1, 1).repeat(2, axis=0)
    out = attention.get(attention_fn)(q, k, k, AttentionMask(), scale=1.0)
    assert np.allclose(out, math.e / (1 + math.e), atol=1e-6)
    weights = attention.attention_weights(q, k, AttentionMask(), scale=1.0)
    expected = np.array([1, math.e]) / (1 + math.e)
    assert np.allclose(weights, expected.reshape(1, 1, 1, 2), atol=1e-6)


@pytest.mark.parametrize("attention_fn", EVERYWHERE)
def test_a_group_of_heads_shares_one_key_and_value_head(attention_fn, rng, assert_equal):
    x = Inputs(rng)
    shared, _ = run(attention_fn, x, AttentionMask(causal=True))
    x.k, x.v = (np.repeat(leaf, N // K, axis=2) for leaf in (x.k, x.v))
    repeated, _ = run(attention_fn, x, AttentionMask(causal=True))
    assert_equal(shared, repeated, 1e-6)


@pytest.mark.parametrize("attention_fn", EVERYWHERE)
def test_values_may_have_a_size_of_their_own(attention_fn, rng, assert_equal):
    x = Inputs(rng, value_size=3)
    out, _ = run(attention_fn, x, MASKS["padding"])
    assert_equal(out, by_hand(x.q, x.k, x.v, MASKS["padding"], 0.5))


def test_dropout_acts_on_the_weights(rng, assert_equal):
    x = Inputs(rng)
    dropout_rng = DropoutRng.create(jax.random.key(5), np.arange(B))
    dropout = Dropout(dropout_rng, "weights", 0.5)

    @jax.jit
    def attend(q, k, v):
        out = attention.reference(q, k, v, AttentionMask(), scale=0.5, dropout=dropout)
        weights = attention.attention_weights(q, k, AttentionMask(), scale=0.5)
        return out, weights, dropout_rng.keep_mask("weights", weights.shape, 0.5)

    out, weights, keep = map(np.asarray, attend(x.q, x.k, x.v))
    dropped = (weights * keep * 2).reshape(B, K, N // K, T, S)
    expected = np.einsum("BKGTS,BSKH->BTKGH", dropped, x.v).reshape(out.shape)
    assert_equal(out, expected)


def test_the_softmax_of_bfloat16_is_taken_in_float32(rng, assert_equal):
    x = Inputs(rng)
    low = [jnp.asarray(leaf, jnp.bfloat16) for leaf in (x.q, x.k, x.v)]
    weights = attention.attention_weights(*low[:2], AttentionMask(), scale=0.5)
    assert weights.dtype == jnp.float32
    assert_equal(weights.sum(-1), np.ones((B, N, T)), 1e-6)
    out, _ = run("reference", x, AttentionMask())
    assert_equal(
        attention.reference(*low, AttentionMask(), scale=0.5).astype(np.float32), out, 0.03
    )


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match="attention function 'flash' is unknown: give one of reference, blockwise"
    ):
        attention.get("flash")


@pytest.mark.parametrize("attention_fn", [*attention.DEVICE_FUNCTIONS, "auto"])
def test_a_bool_array_as_mask_is_refused(attention_fn, rng):
    x = Inputs(rng)
    attend = attention.AutoAttention() if attention_fn == "auto" else attention.get(attention_fn)
    with pytest.raises(ConfigError, match=r"a bool array .* give AttentionMask\(explicit=array\)"):
        attend(x.q, x.k, x.v, EXPLICIT, scale=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_grouped_products_agree_with_their_plain_twins(dtype, rng, assert_equal):
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((B, T, K, N // K, H), (B, S, K, H), (B, S, K, 3))
    )
    weights = jnp.asarray(rng.random((B, K, N // K, T, S)), dtype)

    def plain(q, k, v, weights):
        logits = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
        return logits, jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)

    def grouped(q, k, v, weights):
        logits = query_key_products(q.reshape(B, T, N, H), k).reshape(weights.shape)
        out = weighted_values(weights.reshape(B, N, T, S), v)
        return logits, out.reshape(B, T, K, N // K, 3)

    def outcome(products):
        found, pull = jax.vjp(products, q, k, v, weights)
        return *found, *pull(tuple(map(jnp.cos, found)))

    for given, expected in zip(outcome(grouped), outcome(plain), strict=True):
        assert given.dtype == expected.dtype
        assert_equal(given, expected, 1e-6 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("name", attention.DEVICE_FUNCTIONS)
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
        decoded(attention.get(name)), decoded(attention.reference), strict=True
    ):
        assert_equal(given, expected)
