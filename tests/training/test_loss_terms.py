"""z-loss and word dropout, each against its formula."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import EmbeddingOptions, TransformerConfig
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.cross_entropy import chunked_sums, cross_entropy
from jaxformer.ops.dropout import DropoutRng
from jaxformer.text.data import PairBatch

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
