"""Word-level distillation: the loss against formulas, and what it needs."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.cross_entropy import soft_cross_entropy
from jaxformer.training.losses import seq2seq_loss

CONFIG = TransformerConfig(
    vocab_size=13,
    d_model=12,
    d_ff=14,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=11,
    dropout_rate=0.2,
)
Batch = namedtuple("Batch", "source target example_ids teacher_logits")


@pytest.fixture
def batch(rng):
    """Three pairs of 7 and 5 tokens; the last target is shorter."""
    target = rng.integers(3, 13, (3, 6), np.int32)
    target[2, 4:] = 0
    logits = rng.standard_normal((3, 5, 13)).astype(np.float32)
    return Batch(rng.integers(3, 13, (3, 7), np.int32), target, np.arange(3), logits)


@pytest.fixture
def student(random_params, batch):
    model = EncoderDecoder(CONFIG)
    return model, random_params(model, batch.source, batch.target[:, :-1])


def soften(x):
    x = np.exp(np.asarray(x, np.float64))
    return x / x.sum(axis=-1, keepdims=True)


def test_the_cross_entropy_with_a_distribution_is_the_sum_of_its_formula(rng, assert_equal):
    logits, teacher = rng.standard_normal((2, 3, 5, 13)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.6
    expected = -(soften(teacher) * np.log(soften(logits))).sum(axis=-1)[mask].sum()
    assert_equal(soft_cross_entropy(logits, teacher, jnp.asarray(mask)), expected)
    gradient = jax.grad(soft_cross_entropy)(logits, teacher, jnp.asarray(mask))
    assert_equal(gradient, (soften(logits) - soften(teacher)) * mask[..., None])
    of_teacher = jax.grad(soft_cross_entropy, argnums=1)(logits, teacher, jnp.asarray(mask))
    assert not of_teacher.any(), "a teacher is not trained"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_weighted_sum_of_labels_and_teacher(
    student, batch, assert_equal, smoothing
):
    model, params = student
    options = {"pad": 0, "label_smoothing": smoothing}
    labels, count = seq2seq_loss(model, **options)(params, batch, None)
    total, tokens, more = seq2seq_loss(model, distillation=0.3, **options)(params, batch, None)
    logits = model.apply({"params": params}, batch.source, batch.target[:, :-1], batch.source != 0)
    mask = batch.target[:, 1:] != 0
    taught = soft_cross_entropy(logits, batch.teacher_logits, jnp.asarray(mask))
    assert tokens == count == 13
    assert_equal(more["teacher_loss"], taught)
    assert_equal(total, 0.7 * labels + 0.3 * taught)


@pytest.mark.slow
def test_a_teacher_that_knows_the_labels_adds_their_cross_entropy(student, batch, assert_equal):
    """With R-Drop and dropout too: both passes learn from the teacher."""
    model, params = student
    certain = batch._replace(
        teacher_logits=100.0 * jax.nn.one_hot(batch.target[:, 1:], 13, dtype=jnp.float32)
    )
    rng = jax.random.key(3)
    for options in ({}, {"r_drop": 2.0}):
        plain = seq2seq_loss(model, pad=0, **options)(params, certain, rng)
        both = seq2seq_loss(model, pad=0, distillation=0.6, **options)(params, certain, rng)
        assert_equal(both[0], plain[0])
        assert both[1] == plain[1]
        assert set(both[2]) == {"teacher_loss", *(["kl"] if options else [])}


def test_a_teacher_needs_all_logits_of_the_student(student):
    with pytest.raises(ConfigError, match=r"distillation=0.5 compares all logits .* loss_chunk=7"):
        seq2seq_loss(student[0], pad=0, distillation=0.5, loss_chunk=7)
