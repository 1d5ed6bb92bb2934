"""z-loss, R-Drop and word dropout: each against its formula, and nothing changes without them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import EmbeddingOptions, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.cross_entropy import chunked_cross_entropy, cross_entropy, symmetric_kl
from jaxformer.ops.dropout import DropoutRng
from jaxformer.text.data import PairBatch
from jaxformer.training.losses import causal_loss, masked_and_next_sentence_loss, seq2seq_loss
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


def gradient_of(loss, *args):
    return jax.jit(jax.value_and_grad(lambda *args: loss(*args)[0]))(*args)


def test_z_loss_adds_the_square_of_the_log_normalizer_of_each_token():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)), jnp.float32)
    labels, mask = jnp.asarray(rng.integers(0, 7, (3, 5))), jnp.asarray(rng.random((3, 5)) < 0.6)

    def expected(logits):
        squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return cross_entropy(logits, labels, mask, 0.1)[0] + 0.7 * jnp.sum(squares * mask)

    def chunked(logits):
        return chunked_cross_entropy(lambda x: x, logits, labels, mask, 0.1, 0.7, chunk=4)[0]

    for given in (lambda x: cross_entropy(x, labels, mask, 0.1, 0.7)[0], chunked):
        jax.tree.map(close, jax.value_and_grad(given)(logits), jax.value_and_grad(expected)(logits))


def test_the_symmetric_divergence_is_the_mean_of_both_directions():
    rng = np.random.default_rng(5)
    logits, others = (jnp.asarray(rng.normal(size=(2, 3, 7)), jnp.float32) for _ in range(2))
    mask = jnp.asarray([[True, False, True], [False, True, True]])
    p, q = jax.nn.softmax(logits), jax.nn.softmax(others)
    both = jnp.sum(p * jnp.log(p / q), -1) + jnp.sum(q * jnp.log(q / p), -1)
    close(symmetric_kl(logits, others, mask), jnp.sum(both * mask) / 2.0)


@pytest.mark.long
def test_r_drop_is_two_passes_with_other_masks_and_the_divergence_between_them(params, batch):
    model, rng = EncoderDecoder(SMALL), jax.random.key(3)
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=0.1, r_drop=2.5)
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

    given = gradient_of(lambda params: loss(params, batch, rng), params)
    jax.tree.map(close, given, jax.jit(jax.value_and_grad(expected))(params))
    _, tokens, auxiliary = jax.jit(loss)(params, batch, rng)
    assert tokens == np.sum(batch.target[:, 1:] != PAD) and auxiliary["kl"] > 0.01


def test_without_dropout_the_two_passes_do_not_differ(params, batch):
    model = EncoderDecoder(replace(SMALL, dropout_rate=0.0))
    loss = seq2seq_loss(model, pad=PAD, r_drop=2.5)
    nats, tokens, auxiliary = jax.jit(loss)(params, batch, jax.random.key(3))
    close(auxiliary["kl"], 0.0)
    jax.tree.map(close, jax.jit(loss)(params, batch, None), (nats, tokens))  # one pass


def test_weights_of_zero_change_no_bit(params, batch):
    model, rng = EncoderDecoder(SMALL), jax.random.key(3)

    def plain(params, batch, rng):
        dropout_rng = DropoutRng.create(rng, batch.example_ids)
        inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
        inputs = batch.source, inputs, batch.source != PAD
        logits = model.apply({"params": params}, *inputs, dropout_rng=dropout_rng)
        return cross_entropy(logits, labels, labels != PAD)

    found, expected = (
        gradient_of(loss, params, batch, rng)
        for loss in (seq2seq_loss(model, pad=PAD, r_drop=0.0, z_loss=0.0), plain)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.long
def test_r_drop_has_the_same_gradient_in_parts_of_the_batch(params, batch):
    model = EncoderDecoder(replace(SMALL, embeddings=EmbeddingOptions(dropout_rate=0.2)))
    loss = seq2seq_loss(model, pad=PAD, r_drop=2.5, z_loss=0.01)
    optimizer = make_optimizer(OptimizerConfig())
    state = init_train_state(params, optimizer, jax.random.key(1))
    steps = (make_train_step(loss, optimizer, grad_accumulation=parts) for parts in (1, 3))
    whole, parts = (jax.jit(step)(state, batch)[1] for step in steps)
    for name in ("loss", "tokens", "kl", "grad_norm"):
        close(parts[name], whole[name])


def test_r_drop_needs_all_logits_at_once():
    with pytest.raises(ConfigError, match=r"r_drop=2.5 compares .* give loss_chunk=0"):
        causal_loss(DecoderOnly(SMALL), r_drop=2.5, loss_chunk=4)
    with pytest.raises(TypeError, match="r_drop"):
        masked_and_next_sentence_loss(MaskedLanguageModel(SMALL), r_drop=2.5)  # type: ignore


def test_word_dropout_sets_whole_embeddings_to_zero_and_scales_the_others(random_params):
    config = replace(SMALL, dropout_rate=0.0, embeddings=EmbeddingOptions(dropout_rate=0.4))
    model = DecoderOnly(config)
    tokens = np.random.default_rng(2).integers(1, 11, (3, 7))
    params = random_params(model, tokens)
    dropout_rng = DropoutRng.create(jax.random.key(3), jnp.array([5, 2, 9]))
    given = model.apply({"params": params}, tokens, dropout_rng=dropout_rng, method="hidden")
    kept = np.asarray(dropout_rng.keep_mask("target_words", (3, 7, 1), 0.4))[..., 0]
    table = params["embedding"]["table"] / 0.6
    table[0] = 0.0
    scaled = params | {"embedding": {"table": table}}
    expected = model.apply({"params": scaled}, np.where(kept, tokens, 0), method="hidden")
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

    lost = [~np.any(x, axis=-1) for x in model.apply({"params": params}, ids, method=words)]
    assert np.any(lost[0] != lost[1]) and all(0 < x.sum() < 16 for x in lost)
