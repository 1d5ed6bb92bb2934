"""Losses against the formula in float64, and what padding must not change."""

from dataclasses import replace
from functools import partial
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer as jf
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.cross_entropy import (
    _logsumexp_by_product,
    _logsumexp_in_one_pass,
    chunked_sums,
    cross_entropy,
    token_log_probs,
)
from jaxformer.text.data import MaskedBatch, PairBatch, StreamBatch
from jaxformer.training.losses import (
    causal_loss,
    masked_and_next_sentence_loss,
    seq2seq_loss,
)
from tests.configs import small
from tests.hlo import count_arrays

PAD = 0
SMALL = small(
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.2,
    attention__dropout_rate=0.1,
    feed_forward__dropout_rate=0.3,
)

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def example(dtype=jnp.float32):
    """Ragged logits [3, 5, 7], labels [3, 5] and valid [3, 5]."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(scale=3.0, size=(3, 5, 7)), dtype)
    labels = jnp.asarray(rng.integers(0, 7, size=(3, 5)), jnp.int32)
    return logits, labels, jnp.arange(5)[None] < jnp.array([5, 2, 3])[:, None]


def formula(logits, labels, valid, label_smoothing):
    """-sum_v q(v) log p(v), summed over the valid positions, in float64."""
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    q = np.full(logits.shape, label_smoothing / logits.shape[-1])
    np.put_along_axis(q, np.asarray(labels)[..., None], 1 - label_smoothing + q[0, 0, 0], axis=-1)
    return -(q * log_p).sum(axis=-1)[np.asarray(valid)].sum()


def plain(logits, labels, valid, label_smoothing):
    """The same in JAX, left to automatic differentiation."""
    size = logits.shape[-1]
    q = jax.nn.one_hot(labels, size) * (1 - label_smoothing) + label_smoothing / size
    nats = -(q * jax.nn.log_softmax(logits)).sum(axis=-1)
    return (nats * valid).sum()


def total(logits, labels, valid, label_smoothing):
    return cross_entropy(logits, labels, valid, label_smoothing)[0]


slope_of, plain_slope_of = (jax.jit(jax.grad(f), static_argnums=3) for f in (total, plain))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_sum_and_the_count_over_valid_positions(label_smoothing):
    logits, labels, valid = example()
    nats, tokens = jax.jit(cross_entropy, static_argnums=3)(logits, labels, valid, label_smoothing)
    close(nats, formula(logits, labels, valid, label_smoothing))
    assert tokens == 10 and nats.dtype == tokens.dtype == jnp.float32


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_written_derivative_is_the_automatic_one(label_smoothing):
    logits, labels, valid = example()
    written = slope_of(logits, labels, valid, label_smoothing)
    close(written, plain_slope_of(logits, labels, valid, label_smoothing))
    direction = np.random.default_rng(5).normal(size=logits.shape).astype(np.float32)

    @jax.jit
    def forward(logits, direction):
        def nats(logits):
            return total(logits, labels, valid, label_smoothing)

        return jax.jvp(nats, (logits,), (direction,))[1]

    close(forward(logits, direction), (written * direction).sum())


@pytest.mark.parametrize("logsumexp", [_logsumexp_by_product, _logsumexp_in_one_pass])
def test_the_normalizer_of_an_accelerator_is_that_of_a_cpu(logsumexp, rng, assert_equal):
    logits = 30.0 * rng.standard_normal((2, 5, 13)).astype(np.float32)
    logits[0, 1] = 200.0  # exp overflows without the maximum
    logits[1, 2, 3:] = -np.inf
    both = jax.jit(lambda x: (logsumexp(x), jax.nn.logsumexp(x, axis=-1)))
    assert_equal(*both(logits))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_product_with_the_hessian_is_that_of_a_loss_written_out(
    platform, choose_platform, rng, assert_equal
):
    """Forward over reverse, by what each platform computes."""
    choose_platform(platform)
    logits = jnp.asarray(rng.normal(size=(2, 5, 7)), jnp.float32)
    direction = jnp.asarray(rng.normal(size=(2, 5, 7)), jnp.float32)
    labels, valid = jnp.asarray(rng.integers(0, 7, (2, 5))), jnp.asarray(rng.random((2, 5)) < 0.8)

    def plain(logits):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -jnp.sum(jnp.where(valid, chosen[..., 0], 0.0))

    def ours(logits):
        return cross_entropy(logits, labels, valid)[0]

    found, expected = (
        jax.jvp(jax.grad(loss), (logits,), (direction,))[1] for loss in (ours, plain)
    )
    assert_equal(found, expected, 1e-5)
    assert jnp.abs(found).max() > 0.1


def test_an_invalid_position_adds_exactly_nothing():
    logits, labels, valid = example()
    logits, labels, valid = map(np.asarray, (logits, labels, valid))
    others = np.where(valid[..., None], logits, 50.0 * logits[::-1])
    # Many a data set marks what does not count with -100.
    nowhere = np.where(valid, labels, -100)
    sums = jax.jit(cross_entropy, static_argnums=3)
    for label_smoothing in (0.0, 0.1):
        expected = sums(logits, labels, valid, label_smoothing)
        assert sums(others, nowhere, valid, label_smoothing) == expected
        slope = np.asarray(slope_of(others, nowhere, valid, label_smoothing))
        assert not np.any(slope[~valid]) and np.all(np.isfinite(slope))
        assert np.all(np.any(slope[valid] != 0, axis=-1))
    assert sums(logits, labels, np.zeros_like(valid), 0.1) == (0.0, 0.0)


@pytest.mark.parametrize("label", [-1, -100, 5])
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_a_label_outside_the_classes_is_nan_and_no_class(label, dtype):
    """-1 was the last class."""
    logits, labels = jnp.zeros((1, 2, 5)), np.array([[4, label]], dtype)
    nats, _ = jax.jit(cross_entropy)(logits, labels, np.array([[True, True]]))
    assert np.isnan(nats)
    nats, count = jax.jit(cross_entropy)(logits, labels, np.array([[True, False]]))
    assert (float(nats), float(count)) == (pytest.approx(np.log(5)), 1)


def test_the_gradient_of_labels_of_8_bits_is_that_of_32():
    """Of 300 classes, 0 and 256 had the same number in 8 bits."""
    labels = np.array([0, 3, 127], np.int8)

    def slope(labels):
        loss = lambda logits: cross_entropy(logits, labels, np.ones(3, bool))[0]  # noqa: E731
        return jax.grad(loss)(jnp.zeros((3, 300)))

    assert np.array_equal(slope(labels), slope(labels.astype(np.int32)))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_weights_of_tokens_are_refused(dtype):
    """They were counted, and their losses were not multiplied by them."""
    with pytest.raises(ConfigError, match="loss_mask"):
        unwrap(cross_entropy)(
            jnp.zeros((1, 2, 5)), np.zeros((1, 2), int), np.full((1, 2), 2, dtype)
        )


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels, valid = example(jnp.bfloat16)
    nats, _ = jax.jit(cross_entropy, static_argnums=3)(logits, labels, valid, 0.1)
    assert nats.dtype == jnp.float32
    close(nats, formula(logits.astype(jnp.float32), labels, valid, 0.1))
    slope = slope_of(logits, labels, valid, 0.1)
    exact = plain_slope_of(logits.astype(jnp.float32), labels, valid, 0.1)
    assert slope.dtype == jnp.bfloat16
    np.testing.assert_allclose(slope.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_a_bfloat16_gradient_keeps_no_float32_copy_of_what_its_logits_became():
    shape = 5, 17, 509
    inputs = (jax.ShapeDtypeStruct(shape[:2], kind) for kind in (jnp.int32, bool))
    logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    both = jax.value_and_grad(lambda *given: cross_entropy(*given, 0.1), has_aux=True)
    compiled = jax.jit(both).lower(logits, *inputs).compile()
    # One at most, short-lived: a CPU reads what it adds up in float32. The exponentials are none.
    assert count_arrays(compiled, "f32", shape) <= 1
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 4 * np.prod(shape)


def test_token_log_probs_are_the_labels_share_of_the_softmax():
    logits, labels, _ = example(jnp.bfloat16)
    found = jax.jit(token_log_probs)(logits, labels)
    expected = jax.jit(jax.nn.log_softmax)(logits.astype(jnp.float32))
    assert found.dtype == jnp.float32 and found.shape == labels.shape
    close(
        found, np.take_along_axis(np.asarray(expected), np.asarray(labels)[..., None], -1)[..., 0]
    )


SOURCE_LENGTHS, TARGET_LENGTHS = (5, 7, 0), (6, 2, 0)


@pytest.fixture(scope="module")
def batch():
    """Three sentence pairs, the last one empty: a padding row."""
    rng = np.random.default_rng(11)
    source, target = rng.integers(1, 11, size=(3, 7)), rng.integers(1, 11, size=(3, 7))
    source *= np.arange(7) < np.array(SOURCE_LENGTHS)[:, None]
    target *= np.arange(7) < np.array(TARGET_LENGTHS)[:, None]
    return PairBatch(source, target, np.array([40, 41, 42]))


@pytest.fixture(scope="module")
def model():
    return EncoderDecoder(SMALL)


@pytest.fixture(scope="module")
def params(model, batch, random_params):
    return random_params(model, batch.source, batch.target)


@pytest.fixture(scope="module")
def loss(model):
    return jax.jit(seq2seq_loss(model, pad=PAD, label_smoothing=0.1))


def test_the_loss_is_the_cross_entropy_of_each_next_token(model, params, loss, batch):
    nats, tokens = loss(params, batch, None)
    logits = jax.jit(model.apply)(
        {"params": params}, batch.source, batch.target[:, :-1], batch.source != PAD
    )
    labels = batch.target[:, 1:]
    close(nats, formula(logits, labels, labels != PAD, 0.1))
    assert tokens == 5 + 1


def test_the_loss_of_a_batch_is_the_sum_over_its_sentences_alone(params, loss, batch):
    """With dropout, and without their padding and the row of padding."""
    rng = jax.random.key(3)

    def alone(row):
        source, target, ids = (leaf[row : row + 1] for leaf in batch)
        lengths = SOURCE_LENGTHS[row], TARGET_LENGTHS[row]
        return loss(params, PairBatch(source[:, : lengths[0]], target[:, : lengths[1]], ids), rng)

    close(loss(params, batch, rng), np.sum([alone(0), alone(1)], axis=0))


def head_inputs():
    """Hidden vectors [3, 5, 4], and a matrix [4, 7] and a bias that make logits of them."""
    rng = np.random.default_rng(7)
    sizes = (3, 5, 4), (4, 7), (1, 7)
    return tuple(jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)


def in_chunks(hidden, matrix, bias, labels, valid, label_smoothing=0.0, *, chunk):
    def lm_head(hidden):
        return hidden @ matrix.astype(hidden.dtype) + bias.astype(hidden.dtype)

    sums_of = partial(cross_entropy, label_smoothing=label_smoothing)
    return chunked_sums(sums_of, lm_head, hidden, labels, valid, chunk=chunk)


@pytest.mark.parametrize(
    ("chunk", "label_smoothing"), [(1, 0.0), (4, 0.1), (15, 0.0), (97, 0.1), (4, 0.0)]
)
def test_a_loss_in_chunks_is_the_whole_one_and_so_is_its_gradient(chunk, label_smoothing):
    _, labels, valid = example()
    labels = jnp.where(valid, labels, -100)

    def whole(hidden, matrix, bias):
        return 3.0 * cross_entropy(hidden @ matrix + bias[None], labels, valid, label_smoothing)[0]

    def chunked(*inputs):
        nats, tokens = in_chunks(*inputs, labels, valid, label_smoothing, chunk=chunk)
        return 3.0 * nats, tokens

    @jax.jit
    def run(*inputs):
        both = jax.value_and_grad(chunked, argnums=(0, 1, 2), has_aux=True)(*inputs)
        return jax.value_and_grad(whole, argnums=(0, 1, 2))(*inputs), both, chunked(*inputs)

    (expected, slopes), ((found, tokens), in_parts), alone = run(*head_inputs())
    exact = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    exact((found, alone[0]), (expected, expected))
    jax.tree.map(exact, in_parts, slopes)
    assert not np.any(np.asarray(in_parts[0])[~np.asarray(valid)])
    assert tokens == alone[1] == 10


def test_a_chunk_without_tokens_is_refused():
    _, labels, valid = example()
    with pytest.raises(ValueError, match="chunk=0"):
        in_chunks(*head_inputs(), labels, valid, chunk=0)


def test_a_bfloat16_loss_in_chunks_adds_up_its_matrix_gradient_in_float32():
    _, labels, valid = example()
    hidden, *head = head_inputs()
    gradient = jax.grad(lambda *inputs: in_chunks(*inputs, labels, valid, chunk=4)[0], (0, 1))
    slopes = jax.eval_shape(gradient, hidden.astype(jnp.bfloat16), *head)
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16, jnp.float32]


def text_batch():
    rng = np.random.default_rng(13)
    valid = np.arange(6) < np.array([[6], [2], [4]])
    return StreamBatch(rng.integers(1, 11, (3, 7)), valid, np.arange(3))


def masked_batch():
    rng = np.random.default_rng(17)
    tokens, at, labels = (rng.integers(1, 7, (3, size)) for size in (7, 2, 2))
    valid = np.array([[True, True], [True, False], [False, False]])
    present = np.arange(7) < np.array([[7], [5], [3]])
    return MaskedBatch(
        tokens=tokens,
        padding_mask=present,
        token_type_ids=np.zeros_like(tokens),
        masked_positions=at,
        labels=labels,
        loss_mask=valid,
        example_ids=np.arange(3),
        next_sentence=np.array([1, 0, 1]),
    )


FAMILIES = {
    "translator": (EncoderDecoder, partial(seq2seq_loss, pad=PAD, label_smoothing=0.1), None),
    "writer": (DecoderOnly, causal_loss, text_batch),
    "filler of pairs": (MaskedLanguageModel, masked_and_next_sentence_loss, masked_batch),
}


@pytest.mark.parametrize(
    "family",
    [
        "writer",
        *(pytest.param(f, marks=pytest.mark.long) for f in list(FAMILIES) if f != "writer"),
    ],
)
def test_the_loss_of_every_family_may_be_computed_in_chunks(family, batch, random_params):
    kind, make_loss, make_batch = FAMILIES[family]
    pooler = "tanh" if "filler" in family else "none"
    model = kind(replace(SMALL, output=jf.OutputOptions(bias=True), pooler=pooler))
    batch = make_batch() if make_batch else batch
    inputs = (batch.source, batch.target) if make_batch is None else (batch.tokens,)
    params = random_params(model, *inputs)
    rng = jax.random.key(5)
    found, expected = (
        jax.jit(jax.value_and_grad(make_loss(model, loss_chunk=chunk), has_aux=True))(
            params, batch, rng
        )
        for chunk in (4, 0)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=2e-6), found, expected)


def test_a_step_in_chunks_needs_less_memory_by_about_the_logits():
    model = DecoderOnly(replace(SMALL, vocab_size=2_003, norm=jf.NormOptions(placement="pre")))
    batch = StreamBatch(np.zeros((4, 65), np.int32), np.ones((4, 64), bool), np.arange(4))
    params = jax.eval_shape(model.init, jax.random.key(0), batch.tokens)["params"]
    temporary = []
    for chunk in (0, 32):
        differentiate = jax.jit(jax.grad(causal_loss(model, loss_chunk=chunk), has_aux=True))
        compiled = differentiate.lower(params, batch, None).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    logits = 4 * 64 * 2_003 * 4
    assert temporary[0] - temporary[1] > 0.8 * logits
    assert temporary[1] < 0.8 * logits  # of an eighth of the tokens at a time


class Bigram(nn.Module):
    """A user's own model: the next token depends on the last one alone."""

    def setup(self):
        self.embedding = nn.Embed(11, 5)
        self.lm_head = nn.Dense(11)

    def __call__(self, tokens, segments=None, positions=None, *, dropout_rng=None):
        return self.lm_head(self.hidden(tokens))

    def hidden(self, tokens, segments=None, positions=None, *, dropout_rng=None):
        return jnp.tanh(self.embedding(tokens))


class LogitsOnly(nn.Module):
    def __call__(self, tokens):
        return tokens


def test_a_model_of_ones_own_needs_hidden_and_lm_head_for_chunks(random_params):
    batch = text_batch()
    params = random_params(Bigram(), batch.tokens)
    found, expected = (
        jax.jit(jax.value_and_grad(causal_loss(Bigram(), loss_chunk=chunk), has_aux=True))(
            params, batch, None
        )
        for chunk in (5, 0)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=2e-6), found, expected)
    with pytest.raises(ConfigError, match="loss_chunk=5"):
        causal_loss(LogitsOnly(), loss_chunk=5)({}, batch, None)


def test_z_loss_adds_the_square_of_the_log_normalizer_of_each_token():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)), jnp.float32)
    labels, mask = jnp.asarray(rng.integers(0, 7, (3, 5))), jnp.asarray(rng.random((3, 5)) < 0.6)

    def expected(logits):
        squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return cross_entropy(logits, labels, mask, 0.1)[0] + 0.7 * jnp.sum(squares * mask)

    def chunked(logits):
        sums_of = partial(cross_entropy, label_smoothing=0.1, z_loss=0.7)
        return chunked_sums(sums_of, lambda x: x, logits, labels, mask, chunk=4)[0]

    def whole(logits):
        return cross_entropy(logits, labels, mask, 0.1, 0.7)[0]

    losses = expected, whole, chunked
    theirs, *ours = jax.jit(lambda x: [jax.value_and_grad(loss)(x) for loss in losses])(logits)
    for given in ours:
        jax.tree.map(close, given, theirs)
