"""The training step: one gradient however the batch is cut, and what a step changes."""

import os
import subprocess
import sys
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import TransformerConfig
from jaxformer.losses import seq2seq_loss
from jaxformer.models import EncoderDecoder
from jaxformer.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training import init_state, make_eval_step, make_train_step

PAD, BOS, EOS = 0, 1, 2


class Batch(NamedTuple):
    source: jax.Array
    target: jax.Array
    row: jax.Array


def make_model(d_model=8, **changes):
    config = TransformerConfig(
        vocab_size=11,
        d_model=d_model,
        d_ff=2 * d_model,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        **changes,
    )
    return EncoderDecoder(config)


NOISY = dict(dropout_rate=0.3, attention_dropout_rate=0.1, activation_dropout_rate=0.2)


def make_params(model, deviation=0.5):
    tokens, rng = jnp.ones((2, 3), jnp.int32), np.random.default_rng(7)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(center, deviation, size=leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def ragged_batch(rows=16, seed=0):
    """Sentences to copy, of 1 to 7 words; the second one is a padding row."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=rows)
    lengths[1] = 0
    source = np.zeros((rows, 8), np.int32)
    for row, length in enumerate(lengths):
        if length:
            source[row, : length + 1] = [*rng.integers(3, 11, size=length), EOS]
    target = np.pad(source, ((0, 0), (1, 0)))
    target[:, 0] = np.where(lengths > 0, BOS, PAD)
    return Batch(source, target, 100 + np.arange(rows, dtype=np.int32))


def updated(step, batch, params, optimizer, seed=3):
    """What one jitted step changed in the parameters, and its metrics."""
    state, metrics = jax.jit(step)(init_state(params, optimizer, jax.random.key(seed)), batch)
    return jax.tree.map(jnp.subtract, state.params, params), metrics


def relative(given, expected):
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, given, expected))
    return float(difference / optax.tree.norm(expected))


def setting():
    model = make_model(**NOISY)
    loss = seq2seq_loss(model, pad=PAD, smoothing=0.1)
    return loss, make_params(model), ragged_batch()


@pytest.fixture(scope="module")
def whole():
    """The setting, and the SGD update and metrics of the whole batch at once."""
    loss, params, batch = setting()
    sgd = optax.sgd(1.0)
    return loss, params, batch, updated(make_train_step(loss, sgd), batch, params, sgd)


def test_four_fold_accumulation_is_one_batch(whole):
    loss, params, batch, (expected, sums) = whole
    sgd = optax.sgd(1.0)
    update, metrics = updated(make_train_step(loss, sgd, accumulation=4), batch, params, sgd)
    assert relative(update, expected) < 1e-6
    assert metrics["tokens"] == sums["tokens"]
    np.testing.assert_allclose(metrics["loss"], sums["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], sums["grad_norm"], rtol=1e-5)


def test_a_mean_of_means_is_another_gradient(whole):
    loss, params, batch, (expected, _) = whole
    sgd = optax.sgd(1.0)
    step = jax.jit(make_train_step(loss, sgd))
    state = init_state(params, sgd, jax.random.key(3))
    parts = [step(state, Batch(*(leaf[i::4] for leaf in batch))) for i in range(4)]
    updates = [jax.tree.map(jnp.subtract, part.params, params) for part, _ in parts]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *updates)
    assert len({float(metrics["tokens"]) for _, metrics in parts}) == 4
    assert relative(mean, expected) > 1e-2


def spread_over_four_devices():
    """Prints how far 4 devices that accumulate too are from one, in relative norm."""
    loss, params, batch = setting()
    sgd = optax.sgd(1.0)
    one, sums = updated(make_train_step(loss, sgd), batch, params, sgd)
    add = partial(jax.lax.psum, axis_name="data")
    step = make_train_step(loss, sgd, accumulation=2, reduce=add)
    shards = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), batch)
    state = init_state(params, sgd, jax.random.key(3))
    state, metrics = jax.pmap(step, axis_name="data", in_axes=(None, 0))(state, shards)
    for device in range(4):
        there = jax.tree.map(itemgetter(device), state.params)
        given = jax.tree.map(jnp.subtract, there, params)
        print(relative(given, one), float(metrics["tokens"][device] - sums["tokens"]))


def test_four_devices_that_add_their_sums_are_one_device():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    folder = Path(__file__).parent
    code = "import test_training; test_training.spread_over_four_devices()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder.parent,
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(folder.parent), str(folder)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for difference, tokens in lines:
        assert float(difference) < 1e-6 and float(tokens) == 0.0


def test_the_sgd_update_is_the_mean_gradient_and_metrics_are_sums(whole):
    loss, params, batch, (update, metrics) = whole
    rng = jax.random.fold_in(jax.random.key(3), 0)
    (total, tokens), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, rng)
    mean = jax.tree.map(lambda leaf: -leaf / tokens, grads)
    assert relative(update, mean) < 1e-6
    assert metrics["tokens"] == tokens == np.sum(batch.target[:, 1:] != PAD)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(mean), rtol=1e-5)


def test_a_step_counts_on_and_draws_new_dropout_from_the_same_rng():
    loss, params, batch = setting()
    still = optax.sgd(0.0)
    step = jax.jit(make_train_step(loss, still))
    start = init_state(params, still, jax.random.key(3))
    first, metrics = step(start, batch)
    second, later = step(first, batch)
    _, again = step(start, batch)
    assert [int(state.step) for state in (start, first, second)] == [0, 1, 2]
    assert metrics["loss"] == again["loss"] != later["loss"]
    for state in (first, second):
        assert np.array_equal(jax.random.key_data(state.rng), jax.random.key_data(start.rng))
        assert state.ema is None


def test_ema_moves_towards_the_new_parameters_by_one_minus_its_decay():
    loss, params, batch = setting()
    adam = make_optimizer(OptimizerConfig("constant", learning_rate=0.01, warmup_steps=0))
    step = jax.jit(make_train_step(loss, adam, ema_decay=0.9))
    state = init_state(params, adam, jax.random.key(3), ema=True)
    expected = jax.tree.map(np.asarray, params)
    for _ in range(3):
        state, _ = step(state, batch)
        expected = jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * np.asarray(new), expected, state.params
        )
    assert relative(state.ema, expected) < 1e-6
    assert relative(state.ema, state.params) > 1e-3


def test_a_batch_without_tokens_changes_nothing():
    loss, params, batch = setting()
    empty = jax.tree.map(np.zeros_like, batch)
    update, metrics = updated(make_train_step(loss, optax.sgd(1.0)), empty, params, optax.sgd(1.0))
    assert optax.tree.norm(update) == 0.0
    assert all(value == 0.0 for value in metrics.values())


def test_a_batch_that_does_not_divide_is_refused():
    loss, params, batch = setting()
    step = make_train_step(loss, optax.sgd(1.0), accumulation=3)
    with pytest.raises(ValueError, match="16 rows cannot be accumulated in 3 equal parts"):
        step(init_state(params, optax.sgd(1.0), jax.random.key(3)), batch)


def test_the_evaluation_step_is_the_loss_without_dropout():
    loss, params, batch = setting()
    clean = seq2seq_loss(make_model(), pad=PAD, smoothing=0.1)
    found = jax.jit(make_eval_step(loss))(params, batch)
    expected = jax.jit(clean)(params, batch, jax.random.key(3))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_loss_of_copying_falls_within_a_few_dozen_steps():
    model = make_model(d_model=32, norm_placement="pre")
    adam = make_optimizer(OptimizerConfig("constant", learning_rate=0.01, warmup_steps=10))
    step = jax.jit(make_train_step(seq2seq_loss(model, pad=PAD), adam), donate_argnums=0)
    state = init_state(make_params(model, 0.15), adam, jax.random.key(3))
    losses = []
    for number in range(80):
        state, metrics = step(state, ragged_batch(rows=64, seed=number))
        losses.append(metrics["loss"] / metrics["tokens"])
    # Without reading the source, eight words and an end cost about log 8 = 2.1 nats.
    assert np.mean(losses[:3]) > 2.1
    assert np.mean(losses[-5:]) < 1.0
