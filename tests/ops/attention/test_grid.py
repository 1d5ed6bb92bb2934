"""Each attention function, forward and backward, against float64 over a pairwise grid."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import blockwise, plain, reference, tpu_flash
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

pytestmark = pytest.mark.usefixtures("optimized")

SCALE = 0.6
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.04}


@dataclass(frozen=True)
class Case:
    """One row of the grid; `rows` of the bias, 0 for none; `cap` of the logits."""

    sizes: tuple[int, int]
    heads: tuple[int, int]
    widths: tuple[int, int]
    mask: str
    dtype: str
    rows: int
    rate: float
    block: int
    cap: float | None = None

    @property
    def scale(self):
        """The scale of the logits, lower for wide heads, whose products are large."""
        return min(SCALE, self.widths[0] ** -0.5)

    @property
    def settings(self):
        """The mask, the bias and the dropout, drawn for two rows."""
        rng = np.random.default_rng(3)
        queries, keys = self.sizes
        valid = np.arange(keys) < np.array([[keys], [keys // 2]])
        spread = rng.random((2, keys)) < 0.7
        spread[1] = False
        segments = {
            "query_segments": np.sort(rng.integers(0, 3, (2, queries))),
            "key_segments": np.sort(rng.integers(0, 3, (2, keys))),
        }
        masks = {
            "all": AttentionMask(),
            "causal": AttentionMask(causal=True),
            "offset": AttentionMask(causal=True, offset=keys - queries),
            "window": AttentionMask(
                causal=True, offset=max(keys - queries, 2), window=3 + keys // 9
            ),
            "padding": AttentionMask(padding_mask=valid),
            "holes": AttentionMask(padding_mask=spread),
            "segments": AttentionMask(**segments),
            "packed": AttentionMask(causal=True, padding_mask=valid, **segments),
            "explicit": AttentionMask(explicit=rng.random((2, queries, keys)) < 0.4),
        }
        dropout_rng = DropoutRng(jax.random.key(1), jnp.array([4, 9]))
        bias = rng.standard_normal((self.rows, self.heads[0], *self.sizes)).astype(np.float32)
        dropout = DropoutMask(dropout_rng, "x", self.rate) if self.rate else None
        return masks[self.mask], bias if self.rows else None, dropout


# Each value of a column meets each value of most others; the sizes are no multiples of the blocks.
GRID = [
    Case((5, 7), (6, 2), (4, 4), "all", "float32", 1, 0.0, 3),
    Case((7, 7), (3, 3), (5, 3), "causal", "float32", 2, 0.3, 2, 1.5),
    Case((3, 11), (4, 1), (4, 6), "offset", "bfloat16", 0, 0.3, 4),
    Case((1, 11), (3, 3), (4, 4), "padding", "float32", 0, 0.0, 4),
    Case((11, 5), (6, 2), (4, 6), "window", "bfloat16", 1, 0.0, 2, 0.7),
    Case((5, 7), (4, 1), (5, 3), "holes", "float32", 2, 0.0, 4),
    Case((7, 7), (6, 2), (4, 4), "packed", "bfloat16", 2, 0.3, 3),
    Case((11, 5), (3, 3), (5, 3), "segments", "float32", 0, 0.3, 3),
    Case((5, 11), (6, 2), (4, 6), "explicit", "float32", 0, 0.0, 4),
]


def formula(case, q, k, v, direction):
    """Attention and the gradients of (attention * direction).sum(), in float64, all written out."""
    mask, bias, dropout = case.settings
    share = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, share, axis=2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, wide_k) * case.scale
    slope = case.scale
    if case.cap is not None:
        tanh = np.tanh(logits / case.cap)
        logits, slope = case.cap * tanh, case.scale * (1 - tanh**2)
    logits = logits + (0 if bias is None else bias.astype(np.float64))

    @jax.jit
    def masks():
        kept = jnp.ones(shape, bool)
        if dropout is not None:
            kept = dropout.dropout_rng.keep_mask("x", shape, case.rate)
        return mask.materialize(*case.sizes), kept

    shape = logits.shape
    dense, kept = masks()
    dense = np.broadcast_to(True if dense is None else dense, logits.shape)
    weights = np.exp(np.where(dense, logits - logits.max(-1, keepdims=True), -np.inf))
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    kept = np.asarray(kept) / (1 - case.rate)
    out = np.einsum("bnts,bsnh->btnh", weights * kept, wide_v)
    pull = kept * np.einsum("btnh,bsnh->bnts", direction, wide_v)
    pull = weights * (pull - (weights * pull).sum(-1, keepdims=True))

    def narrow(x):
        return x.reshape(*x.shape[:2], k.shape[2], share, -1).sum(3)

    gradients = {
        "q": np.einsum("bnts,bsnh->btnh", pull * slope, wide_k),
        "k": narrow(np.einsum("bnts,btnh->bsnh", pull * slope, q)),
        "v": narrow(np.einsum("bnts,btnh->bsnh", weights * kept, direction)),
    }
    if case.rows:
        gradients["bias"] = pull.sum(0, keepdims=True) if case.rows == 1 else pull
    return out, gradients


def drawn(case):
    rng = np.random.default_rng(0)
    (queries, keys), (heads, groups), (width, value) = case.sizes, case.heads, case.widths
    shapes = (2, queries, heads, width), (2, keys, groups, width), (2, keys, groups, value)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), case.dtype) for shape in shapes)
    return q, k, v, rng.standard_normal((2, queries, heads, value)).astype(np.float32)


def computed(attention_fn, case, q, k, v, direction):
    mask, bias, dropout = case.settings
    options = {} if case.cap is None else {"softcap": case.cap}
    inputs = {"q": q, "k": k, "v": v} | ({} if bias is None else {"bias": bias})

    def mixture(inputs):
        bias = inputs.get("bias")
        q, k, v = (inputs[name] for name in "qkv")
        out = attention_fn(q, k, v, mask, scale=case.scale, bias=bias, dropout=dropout, **options)
        return (out * direction).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(mixture, has_aux=True))(inputs)
    return out, gradients


def check(attention_fn, case, assert_equal):
    inputs = drawn(case)
    out, gradients = computed(attention_fn, case, *inputs)
    assert out.dtype == gradients["q"].dtype == gradients["k"].dtype == case.dtype
    expected, expected_gradients = formula(case, *(np.asarray(x, np.float64) for x in inputs))
    assert_equal(out, expected, TOLERANCES[case.dtype])
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_equal(gradient, expected_gradients[name], TOLERANCES[case.dtype])


QUICK = ("causal", "packed")
CASES = [pytest.param(x, marks=() if x.mask in QUICK else pytest.mark.long) for x in GRID]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mask)
def test_blockwise_is_the_formula_and_its_gradients(case, assert_equal):
    check(partial(blockwise, block=case.block), case, assert_equal)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mask)
def test_reference_is_the_formula_and_its_gradients(case, assert_equal):
    check(reference, case, assert_equal)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mask)
def test_plain_attention_is_the_formula_and_its_gradients(case, assert_equal):
    check(plain, case, assert_equal)


def on_tpu(sizes, heads, widths, mask="causal", dtype="float32", rate=0.0, cap=None):
    """A case of lengths that the TPU's kernel supports."""
    return Case(sizes, heads, widths, mask, dtype, 0, rate, 128, cap)


# Heads in groups of 128 lanes, groups that share keys, and padding of lanes, heads and lengths.
TPU_GRID = [
    on_tpu((128, 384), (4, 2), (96, 80), "packed", rate=0.3, cap=1.5),
    *(
        pytest.param(case, marks=pytest.mark.long)
        for case in (
            on_tpu((128, 384), (4, 2), (64, 64), "packed", rate=0.3),
            on_tpu((128, 384), (2, 1), (96, 80), "window", cap=1.5),
            on_tpu((128, 640), (6, 2), (32, 24), "window", cap=1.5),
            on_tpu((256, 384), (1, 1), (256, 256), "all"),
            on_tpu((256, 384), (12, 4), (32, 32), "offset", "bfloat16"),
            on_tpu((384, 384), (2, 2), (64, 64), cap=0.7),
            on_tpu((256, 384), (3, 1), (128, 128), "holes"),
            on_tpu((256, 384), (8, 8), (16, 16), "segments", "bfloat16", 0.1),
            on_tpu((521, 521), (5, 5), (80, 40), rate=0.1),
            on_tpu((521, 643), (8, 1), (64, 64), "all"),
            on_tpu((641, 521), (6, 2), (48, 48), "packed", "bfloat16", 0.1),
            on_tpu((256, 128), (3, 3), (11, 7), "window", "bfloat16"),
        )
    ),
]


@pytest.mark.parametrize("case", TPU_GRID, ids=lambda case: f"{case.mask}-{case.dtype}")
def test_flash_attention_of_tpus_is_the_formula_and_its_gradients(case, assert_equal):
    check(partial(tpu_flash, interpret=True), case, assert_equal)
