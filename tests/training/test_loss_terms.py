"""z-loss, R-Drop, distillation and word dropout, each against its formula."""

from collections import namedtuple
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.training.r_drop import r_drop, symmetric_kl
from experiments.translation.teacher import distilled, soft_cross_entropy
from jaxformer.config import EmbeddingOptions, TransformerConfig
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.cross_entropy import chunked_sums, cross_entropy
from jaxformer.ops.dropout import DropoutRng
from jaxformer.text.data import PairBatch
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import init_train_state, make_train_step

PAD = 0
SMALL = TransformerConfig(
    vocab_size=11,
    d_model=6,
    d_ff=10,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.3,
)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def batch():
    """Three sentence pairs of different lengths, the last one empty."""
    rng = np.random.default_rng(11)
    source, target = rng.integers(1, 11, size=(3, 5)), rng.integers(1, 11, size=(3, 8))
    source *= np.arange(5) < np.array([[5], [2], [0]])
    target *= np.arange(8) < np.array([[3], [8], [0]])
    return PairBatch(source, target, np.array([40, 7, 42]))


@pytest.fixture
def params(random_params, batch):
    return random_params(EncoderDecoder(SMALL), batch.source, batch.target)


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


def test_the_symmetric_divergence_is_the_mean_of_both_directions():
    logits, others = np.random.default_rng(5).normal(size=(2, 2, 3, 7)).astype(np.float32)
    mask = np.array([[True, False, True], [False, True, True]])
    p, q = soften(logits), soften(others)
    both = np.sum(p * np.log(p / q), -1) + np.sum(q * np.log(q / p), -1)
    close(jax.jit(symmetric_kl)(logits, others, mask), np.sum(both * mask) / 2.0)


@pytest.mark.long
def test_r_drop_is_two_passes_with_other_masks_and_the_divergence_between_them(params, batch):
    model, rng = EncoderDecoder(SMALL), jax.random.key(3)
    loss = r_drop(seq2seq_loss(model, pad=PAD, label_smoothing=0.1), 2.5)
    plain = seq2seq_loss(model, pad=PAD, label_smoothing=0.1)
    other = batch._replace(example_ids=~batch.example_ids)

    def logits_of(params, batch):
        dropout_rng = DropoutRng.create(rng, batch.example_ids)
        inputs = batch.source, batch.target[:, :-1], batch.source != PAD
        return model.apply({"params": params}, *inputs, dropout_rng=dropout_rng)

    def expected(params):
        mask = batch.target[:, 1:] != PAD
        kl = symmetric_kl(logits_of(params, batch), logits_of(params, other), mask)
        nats = plain(params, batch, rng)[0] + plain(params, other, rng)[0]
        return (nats + 2.5 * kl) / 2.0

    @jax.jit
    def run(params):
        def given(params):
            nats, *others = loss(params, batch, rng)
            return nats, others

        return jax.value_and_grad(given, has_aux=True)(params), jax.value_and_grad(expected)(params)

    ((nats, (tokens, auxiliary)), gradient), theirs = run(params)
    jax.tree.map(close, (nats, gradient), theirs)
    assert tokens == np.sum(batch.target[:, 1:] != PAD) and auxiliary["kl"] > 0.01


def test_without_dropout_the_two_passes_do_not_differ(params, batch):
    model = EncoderDecoder(replace(SMALL, dropout_rate=0.0))
    loss = r_drop(seq2seq_loss(model, pad=PAD), 2.5)

    @jax.jit
    def run(params):
        return loss(params, batch, jax.random.key(3)), loss(params, batch, None)

    (nats, tokens, auxiliary), one_pass = run(params)
    close(auxiliary["kl"], 0.0)
    jax.tree.map(close, one_pass, (nats, tokens))


@pytest.mark.long
def test_r_drop_has_the_same_gradient_in_parts_of_the_batch(params, batch):
    model = EncoderDecoder(replace(SMALL, embeddings=EmbeddingOptions(dropout_rate=0.2)))
    loss = r_drop(seq2seq_loss(model, pad=PAD, z_loss=0.01), 2.5)
    optimizer = make_optimizer(OptimizerConfig())
    state = init_train_state(params, optimizer, jax.random.key(1))
    steps = (make_train_step(loss, optimizer, grad_accumulation=parts) for parts in (1, 3))
    whole, parts = (jax.jit(step)(state, batch)[1] for step in steps)
    for name in ("loss", "tokens", "kl", "grad_norm"):
        close(parts[name], whole[name])


@pytest.fixture
def taught(batch, rng):
    """The batch with a teacher's logits."""
    logits = rng.standard_normal((3, 7, 11)).astype(np.float32)
    return namedtuple("Taught", (*batch._fields, "teacher_logits"))(*batch, logits)


def soften(x):
    x = np.exp(np.asarray(x, np.float64))
    return x / x.sum(axis=-1, keepdims=True)


def test_the_cross_entropy_with_a_distribution_is_the_sum_of_its_formula(rng):
    logits, teacher = rng.standard_normal((2, 3, 5, 13)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.6
    expected = -(soften(teacher) * np.log(soften(logits))).sum(axis=-1)[mask].sum()
    run = jax.jit(jax.value_and_grad(soft_cross_entropy, argnums=(0, 1)))
    nats, (gradient, of_teacher) = run(logits, teacher, mask)
    close(nats, expected)
    close(gradient, (soften(logits) - soften(teacher)) * mask[..., None])
    assert not of_teacher.any(), "a teacher is not trained"


def test_the_loss_is_the_weighted_sum_of_labels_and_teacher(params, taught):
    model = EncoderDecoder(SMALL)
    loss = distilled(0.3)(model, pad=PAD, label_smoothing=0.1)

    def parts(params):
        logits = model.apply(
            {"params": params}, taught.source, taught.target[:, :-1], taught.source != PAD
        )
        labels = taught.target[:, 1:]
        nats, count = cross_entropy(logits, labels, labels != PAD, 0.1)
        return nats, count, soft_cross_entropy(logits, taught.teacher_logits, labels != PAD)

    (total, tokens, more), (labels, count, teacher) = jax.jit(
        lambda params: (loss(params, taught, None), parts(params))
    )(params)
    assert tokens == count == 9
    close(more["teacher_loss"], teacher)
    close(total, 0.7 * labels + 0.3 * teacher)


@pytest.mark.long
def test_a_teacher_that_knows_the_labels_adds_their_cross_entropy(params, taught):
    """With R-Drop and dropout too: both passes learn from the teacher."""
    model, labels = EncoderDecoder(SMALL), taught.target[:, 1:]
    certain = taught._replace(teacher_logits=100.0 * jax.nn.one_hot(labels, 11, dtype=jnp.float32))
    rng = jax.random.key(3)
    for wrap, sums in ((lambda loss: loss, set()), (partial(r_drop, weight=2.0), {"kl"})):
        losses = seq2seq_loss(model, pad=PAD), distilled(0.6)(model, pad=PAD)
        plain, both = (wrap(loss)(params, certain, rng) for loss in losses)
        close(both[0], plain[0])
        assert both[1] == plain[1] and set(both[2]) == {"teacher_loss", *sums}


@pytest.mark.long
def test_terms_that_compare_distributions_may_be_computed_in_chunks(params, taught):
    terms = {"label_smoothing": 0.1, "z_loss": 0.01, "pad": PAD}
    rng = jax.random.key(3)

    def computed(chunk):
        loss = r_drop(distilled(0.3)(EncoderDecoder(SMALL), loss_chunk=chunk, **terms), 2.5)

        def nats_first(params):
            nats, *others = loss(params, taught, rng)
            return nats, others

        return jax.jit(jax.value_and_grad(nats_first, has_aux=True))(params)

    whole = computed(0)
    jax.tree.map(close, computed(5), whole)
    assert whole[0][1][1]["kl"] > 0.01


def test_word_dropout_sets_whole_embeddings_to_zero_and_scales_the_others(random_params):
    config = replace(SMALL, dropout_rate=0.0, embeddings=EmbeddingOptions(dropout_rate=0.4))
    model = DecoderOnly(config)
    tokens = np.random.default_rng(2).integers(1, 11, (3, 7))
    params = random_params(model, tokens)
    dropout_rng = DropoutRng.create(jax.random.key(3), jnp.array([5, 2, 9]))
    table = params["embedding"]["table"] / 0.6
    table[0] = 0.0
    scaled = params | {"embedding": {"table": table}}

    @jax.jit
    def run(params, scaled):
        hidden = partial(model.apply, method="hidden")
        kept = dropout_rng.keep_mask("target_words", (3, 7, 1), 0.4)[..., 0]
        given = hidden({"params": params}, tokens, dropout_rng=dropout_rng)
        return kept, given, hidden({"params": scaled}, jnp.where(kept, tokens, 0))

    kept, given, expected = run(params, scaled)
    close(given, expected)
    assert 5 < kept.sum() < 19


def test_source_and_target_lose_different_words(params, batch):
    model = EncoderDecoder(
        replace(SMALL, dropout_rate=0.0, embeddings=EmbeddingOptions(dropout_rate=0.5))
    )
    dropout_rng = DropoutRng.create(jax.random.key(3), np.array([5, 2]))
    ids = np.full((2, 8), 4)

    def words(model, ids):
        sides = ("source", "target")
        return [model.embed(model.embedding, ids, dropout_rng, side) for side in sides]

    embedded = jax.jit(partial(model.apply, method=words))({"params": params}, ids)
    lost = [~np.any(x, axis=-1) for x in embedded]
    assert np.any(lost[0] != lost[1]) and all(0 < x.sum() < 16 for x in lost)
