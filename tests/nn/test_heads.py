"""Heads: what BERT is pretrained with, and a classifier on any backbone, with their losses."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import BERT_BASE, OutputOptions, Rotary
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.text.data import MaskedBatch, StreamBatch
from jaxformer.training.losses import (
    causal_loss,
    classification_loss,
    masked_and_next_sentence_loss,
    masked_loss,
    span_loss,
)
from tests.configs import small

B, T, P, V, D, C = 3, 7, 2, 23, 12, 5

BERT = replace(
    BERT_BASE, vocab_size=V, d_model=D, d_ff=13, num_heads=3, num_encoder_layers=1, max_len=T
)
GPT = small(vocab_size=V, num_decoder_layers=1, norm__placement="pre", positions=Rotary())
PRESENT = np.arange(T) < np.array([[7], [4], [5]])


class Labelled(NamedTuple):
    tokens: Any
    padding_mask: Any
    labels: Any
    loss_mask: Any
    example_ids: Any
    token_type_ids: Any = None


@pytest.fixture(scope="module")
def masked():
    rng = np.random.default_rng(1)
    return MaskedBatch(
        tokens=rng.integers(1, V, (B, T)) * PRESENT,
        padding_mask=PRESENT,
        token_type_ids=np.int32(np.arange(T) > 2) * PRESENT,
        masked_positions=np.array([[1, 6], [0, 3], [4, 0]]),
        labels=rng.integers(0, V, (B, P)),
        loss_mask=np.array([[True, True], [True, True], [True, False]]),
        example_ids=np.arange(B),
        next_sentence=np.array([1, 0, 1]),
    )


@pytest.fixture(scope="module")
def bert(masked, random_params):
    model = MaskedLanguageModel(BERT)
    return model, random_params(model, *masked[:4])


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_a_masked_model_without_a_bias_of_its_logits_is_refused():
    model = MaskedLanguageModel(replace(BERT, output=OutputOptions(bias=False)))
    with pytest.raises(ConfigError, match="output.bias=False"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3), jnp.int32))


def test_without_positions_asked_for_every_token_gets_logits(bert, masked, assert_equal):
    model, params = bert

    @jax.jit
    def run(params):
        return [model.apply({"params": params}, *masked[:n]).logits for n in (3, 4)]

    everywhere, some = run(params)
    assert everywhere.shape == (B, T, V)
    assert_equal(
        np.take_along_axis(np.asarray(everywhere), masked.masked_positions[..., None], axis=1), some
    )


def test_without_a_pooler_nothing_is_said_of_the_next_sentence(masked):
    model = MaskedLanguageModel(replace(BERT, pooler="none"))
    filling = jax.eval_shape(
        lambda *inputs: model.init_with_output(jax.random.key(0), *inputs)[0], *masked[:4]
    )
    assert filling.next_sentence is None


def test_the_masked_loss_is_the_cross_entropy_of_the_chosen_tokens(bert, masked, assert_equal):
    model, params = bert

    @jax.jit
    def run(params):
        filling = model.apply({"params": params}, *masked[:4])
        tokens = cross_entropy(filling.logits, masked.labels, masked.loss_mask)
        sentences = cross_entropy(filling.next_sentence, masked.next_sentence, jnp.ones(B, bool))
        one = masked_loss(model)(params, masked, None)
        return tokens, sentences, one, masked_and_next_sentence_loss(model)(params, masked, None)

    tokens, sentences, one, both = run(params)
    assert_equal(one, tokens)
    assert one[1] == 5
    assert_equal(both, [tokens[0] + P * sentences[0], 5])


def test_rows_of_padding_add_nothing_to_the_next_sentence_loss(bert, masked, assert_equal):
    model, params = bert
    empty = jax.tree.map(lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[:2])]), masked)
    loss = masked_and_next_sentence_loss(model)
    assert_equal(*jax.jit(lambda params: [loss(params, x, None) for x in (empty, masked)])(params))


def mean_of_real(hidden):
    return np.stack([hidden[i][PRESENT[i]].mean(axis=0) for i in range(B)])


# The backbone, the pooling, and the vector of each text from the backbone's vectors and pooler.
VECTORS = {
    "first": (EncoderOnly(replace(BERT, pooler="none")), "token", lambda hidden, _: hidden[:, 0]),
    "mean": (EncoderOnly(BERT), "mean", lambda hidden, _: mean_of_real(hidden)),
    "last": (DecoderOnly(GPT), "token", lambda hidden, _: hidden[np.arange(B), [6, 3, 4]]),
    "decoder's mean": (DecoderOnly(GPT), "mean", lambda hidden, _: mean_of_real(hidden)),
}


def applied_and_loss(model, make_loss, params, batch, *types):
    """The model's output for the batch's tokens, and its loss."""

    @jax.jit
    def run(params, batch):
        out = model.apply({"params": params}, batch.tokens, batch.padding_mask, *types)
        return out, make_loss(model)(params, batch, None)

    return run(params, batch)


@pytest.mark.parametrize("name", VECTORS)
def test_a_classifier_is_a_dense_layer_on_one_vector_of_the_real_tokens(
    name, masked, random_params, assert_equal
):
    backbone, pooling, vector_of = VECTORS[name]
    is_encoder = isinstance(backbone, EncoderOnly)
    model, tokens = Classifier(backbone, C, pooling), masked.tokens
    types = (masked.token_type_ids,) if is_encoder else ()
    params = random_params(model, tokens, PRESENT)

    @jax.jit
    def run(params, tokens):
        variables = {"params": params["backbone"]}
        if is_encoder:
            encoded = backbone.apply(variables, tokens, PRESENT, *types)
        else:
            encoded = backbone.apply(variables, tokens, method="hidden"), None
        return model.apply({"params": params}, tokens, PRESENT, *types), encoded

    logits, (hidden, pooled) = jax.tree.map(np.asarray, run(params, tokens))
    vectors = vector_of(hidden, pooled)
    assert_equal(logits, vectors @ params["head"]["kernel"] + params["head"]["bias"])
    assert_equal(run(params, np.where(PRESENT, tokens, 1))[0], logits)


def test_the_loss_of_a_classifier_counts_valid_rows(masked, random_params, assert_equal):
    model = Classifier(DecoderOnly(GPT), C)
    params = random_params(model, masked.tokens, PRESENT)
    valid = np.array([True, False, True])
    batch = Labelled(masked.tokens, PRESENT, np.array([4, 1, 0]), valid, np.arange(B))
    logits, (nats, count) = applied_and_loss(model, classification_loss, params, batch)
    assert_equal(nats, -log_softmax(logits)[[0, 2], [4, 0]].sum())
    assert count == 2


def test_the_loss_of_a_span_is_the_mean_of_its_ends_over_real_tokens(
    masked, random_params, assert_equal
):
    backbone = EncoderOnly(BERT)
    model = SpanPredictor(backbone)
    params = random_params(model, *masked[:3])
    places = np.array([[2, 6], [0, 0], [4, 4]])
    counts = np.array([True, False, True])
    batch = Labelled(*masked[:2], places, counts, np.arange(B), masked.token_type_ids)
    hidden, _ = jax.jit(backbone.apply)({"params": params["backbone"]}, *masked[:3])
    ends, (nats, count) = applied_and_loss(model, span_loss, params, batch, masked[2])
    logits = (np.asarray(hidden) @ params["head"]["kernel"] + params["head"]["bias"]).swapaxes(1, 2)
    assert_equal(ends, logits)
    log_probs = log_softmax(np.where(PRESENT[:, None], logits, -np.inf))
    expected = -sum(log_probs[row, i, places[row, i]] for row in (0, 2) for i in (0, 1)) / 2
    assert_equal(nats, expected)
    assert count == 2


def test_a_class_of_each_token_is_a_dense_layer_on_its_vector(masked, random_params, assert_equal):
    backbone = EncoderOnly(BERT)
    model = TokenClassifier(backbone, C)
    params = random_params(model, *masked[:3])
    labels = np.arange(B * T).reshape(B, T) % C
    batch = Labelled(*masked[:2], labels, PRESENT, np.arange(B), masked.token_type_ids)
    hidden, _ = jax.jit(backbone.apply)({"params": params["backbone"]}, *masked[:3])
    logits, (nats, count) = applied_and_loss(model, classification_loss, params, batch, masked[2])
    assert_equal(logits, np.asarray(hidden) @ params["head"]["kernel"] + params["head"]["bias"])
    chosen = np.take_along_axis(log_softmax(logits), labels[..., None], -1)[..., 0]
    assert_equal(nats, -chosen[PRESENT].sum())
    assert count == PRESENT.sum()


def test_dropout_acts_on_the_summary(masked, random_params):
    model = Classifier(DecoderOnly(replace(GPT, dropout_rate=0.5)), C)
    params = random_params(model, masked.tokens, PRESENT)
    batch = Labelled(masked.tokens, PRESENT, np.zeros(B, int), np.ones(B, bool), np.arange(B))
    loss = classification_loss(model)

    @jax.jit
    def slopes(head):
        def nats(head, rng):
            return loss(params | {"head": head}, batch, rng)[0]

        return [jax.grad(nats)(head, rng)["kernel"] for rng in (jax.random.key(0), None)]

    slope, calm = map(np.asarray, slopes(params["head"]))
    # The gradient of a dense layer's row is zero where every text's number was dropped.
    assert (slope == 0).all(-1).any() and not (calm == 0).all(-1).any()


def test_the_causal_loss_is_the_cross_entropy_of_each_next_token(rng, random_params, assert_equal):
    model = DecoderOnly(GPT)
    tokens = rng.integers(0, V, (B, T + 1))
    segments = np.repeat([[1, 1, 1, 2, 2, 2, 2, 3]], B, axis=0)
    positions = np.repeat([[0, 1, 2, 0, 1, 2, 3, 0]], B, axis=0)
    valid = (segments[:, 1:] == segments[:, :-1]) & PRESENT
    params = random_params(model, tokens)

    @jax.jit
    def run(params):
        inputs = tokens[:, :-1], segments[:, :-1], positions[:, :-1]
        batch = StreamBatch(tokens, valid, np.arange(B), segments, positions)
        return model.apply({"params": params}, *inputs), causal_loss(model)(params, batch, None)

    logits, (nats, count) = run(params)
    picked = np.take_along_axis(log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    assert_equal(nats, -picked[valid].sum())
    assert count == valid.sum()
