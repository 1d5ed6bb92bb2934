"""A loss of one's own: the example, and the options that a loss is made with."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples.custom_loss import focal_loss
from experiments.harness.training.build import build_loss
from experiments.language_modelling.presets import PRESETS
from experiments.language_modelling.train import train
from jaxformer.errors import ConfigError
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import language_config

MODEL = jf.DecoderOnly(
    jf.TransformerConfig(
        vocab_size=13, d_model=10, d_ff=14, num_heads=2, num_decoder_layers=1, dropout_rate=0.3
    )
)
TRAINING = PRESETS["python_stdlib"].training


@pytest.fixture
def batch(rng):
    """Rows of two documents each, whose lengths differ; some labels do not count."""
    lengths = np.array([[4, 8], [7, 5], [2, 10]])
    segments = np.stack([np.repeat([1, 2], row) for row in lengths]).astype(np.int32)
    positions = np.stack([np.concatenate(list(map(np.arange, row))) for row in lengths])
    tokens = rng.integers(0, 13, segments.shape).astype(np.int32)
    loss_mask = segments[:, 1:] == segments[:, :-1]
    return jf.StreamBatch(
        tokens, loss_mask, np.array([5, 3, 11], np.int32), segments, positions.astype(np.int32)
    )


@pytest.fixture
def params(random_params, batch):
    return random_params(MODEL, batch.tokens[:, :-1])


@pytest.mark.parametrize("key", [None, jax.random.key(7)], ids=["no dropout", "dropout"])
def test_the_focal_loss_without_focus_is_the_causal_loss(key, params, batch):
    def value(make_loss):
        def sums(params):
            nats, count = make_loss(MODEL)(params, batch, key)
            return nats, count

        return jax.jit(jax.value_and_grad(sums, has_aux=True))(params)

    (nats, count), gradient = value(partial(focal_loss, gamma=0.0))
    (expected, number), slope = value(jf.causal_loss)
    assert count == number and count < batch.loss_mask.size
    np.testing.assert_allclose(nats, expected, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), gradient, slope)


def test_the_focal_loss_weighs_each_token_by_the_doubt_about_it(params, batch):
    logits = MODEL.apply(
        {"params": params},
        batch.tokens[:, :-1],
        batch.segments[:, :-1],
        batch.positions[:, :-1],
    )
    p = np.take_along_axis(np.asarray(jax.nn.softmax(logits)), batch.tokens[:, 1:, None], -1)
    p = p[..., 0].astype(np.float64)
    expected = np.sum((1 - p) ** 2 * -np.log(p) * batch.loss_mask)
    nats, count = focal_loss(MODEL)(params, batch, None)
    np.testing.assert_allclose(nats, expected, rtol=1e-4)
    assert count == batch.loss_mask.sum()


def plain_loss(model):
    """A loss that takes no option."""
    return jf.causal_loss(model)


def any_options(model, **options):
    """A loss that takes every option of `causal_loss`."""
    return jf.causal_loss(model, **options)


def test_a_loss_gets_the_options_that_are_set_and_needs_no_argument_for_others(params, batch):
    loss = build_loss(TRAINING, plain_loss)(MODEL)
    assert jnp.isfinite(loss(params, batch, None)[0])
    chunked = replace(TRAINING, loss_chunk=5, z_loss=0.25)
    nats, _ = build_loss(chunked, any_options)(MODEL)(params, batch, None)
    expected, _ = jf.causal_loss(MODEL, z_loss=0.25)(params, batch, None)
    np.testing.assert_allclose(nats, expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="loss_chunk.*plain_loss"):
        build_loss(chunked, plain_loss)
    with pytest.raises(ConfigError, match=r"label_smoothing.*plain_loss"):
        build_loss(TRAINING, plain_loss, label_smoothing=0.1)


@pytest.mark.long
def test_a_run_trains_and_validates_by_a_loss_that_takes_no_option(tmp_path):
    config = language_config(tmp_path)
    result = train(config, loss=focal_loss)
    lines = metrics_of(result.folder, "validation_custom_loss")
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert 0 < line["validation_custom_loss"] < line["validation_loss"], "1 - p is below 1"
