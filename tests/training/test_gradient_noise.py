"""The gradient noise scale of gradients whose mean and covariance are known."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.distributed import make_mesh, sharded, single
from jaxformer.errors import ConfigError
from jaxformer.training.gradients import NOISE_METRICS as METRICS
from jaxformer.training.train_step import init_train_state, make_train_step

SGD = optax.sgd(0.0)
MEAN, DEVIATION = np.array([3.0, -4.0, 0.0]), np.array([2.0, 1.0, 5.0])


class Batch(NamedTuple):
    """Rows of up to 3 tokens; the gradient of a token is its vector."""

    vectors: np.ndarray  # [B, 3, D]
    mask: np.ndarray  # [B, 3]


def loss(params, batch, rng):
    used = batch.vectors * batch.mask[..., None]
    return jnp.sum(used @ params["w"]), jnp.sum(batch.mask)


def make_batch(seed, rows=60):
    rng = np.random.default_rng(seed)
    vectors = MEAN + DEVIATION * rng.normal(size=(rows, 3, 3))
    mask = np.arange(3) < rng.integers(1, 4, (rows, 1))
    return Batch(vectors.astype(np.float32), mask.astype(np.float32))


def metrics_of(seeds, parts):
    step = jax.jit(make_train_step(loss, SGD, grad_accumulation=parts, gradient_noise_scale=True))
    state = init_train_state({"w": jnp.zeros(3)}, SGD, jax.random.key(0))
    found = [step(state, make_batch(seed, rows=10))[1] for seed in seeds]
    return {name: np.array([float(metrics[name]) for metrics in found]) for name in METRICS}


def test_the_estimates_are_the_square_of_the_mean_and_the_trace_of_the_covariance():
    found = metrics_of(range(1_500), parts=5)
    assert np.mean(found["gradient_square"]) == pytest.approx(np.sum(MEAN**2), rel=0.03)
    assert np.mean(found["gradient_noise"]) == pytest.approx(np.sum(DEVIATION**2), rel=0.1)
    quotient = found["gradient_noise"] / found["gradient_square"]
    np.testing.assert_allclose(found["gradient_noise_scale"], quotient, rtol=1e-5)


def test_without_noise_between_tokens_it_is_zero():
    batch = make_batch(3)._replace(vectors=np.broadcast_to(MEAN, (60, 3, 3)).astype(np.float32))
    step = make_train_step(loss, SGD, grad_accumulation=4, gradient_noise_scale=True)
    state = init_train_state({"w": jnp.zeros(3)}, SGD, jax.random.key(0))
    _, metrics = jax.jit(step)(state, batch)
    assert float(metrics["gradient_noise"]) == pytest.approx(0.0, abs=1e-3)
    assert float(metrics["gradient_square"]) == pytest.approx(25.0, rel=1e-5)


def test_a_part_without_tokens_does_not_count():
    batch = make_batch(3, rows=12)
    empty = batch._replace(mask=batch.mask * (np.arange(12) % 4 != 1)[:, None])
    without = Batch(*(np.delete(leaf, slice(1, None, 4), axis=0) for leaf in batch))
    state = init_train_state({"w": jnp.zeros(3)}, SGD, jax.random.key(0))
    found = [
        make_train_step(loss, SGD, grad_accumulation=parts, gradient_noise_scale=True)(state, one)
        for parts, one in ((4, empty), (3, without))
    ]
    for name in METRICS:
        np.testing.assert_allclose(found[0][1][name], found[1][1][name], rtol=1e-4)


def test_the_metrics_are_there_only_where_they_are_asked_for():
    state = init_train_state({"w": jnp.zeros(3)}, SGD, jax.random.key(0))
    _, metrics = make_train_step(loss, SGD, grad_accumulation=2)(state, make_batch(3))
    assert not {*METRICS, "_parts"} & set(metrics)


def test_one_part_or_a_gradient_that_is_added_up_early_is_refused():
    with pytest.raises(ConfigError, match="there is one part: give grad_accumulation=2 or more"):
        single().step(loss, SGD, gradient_noise_scale=True)
    mesh = sharded(make_mesh("data=1", jax.devices()[:1]))
    with pytest.raises(ConfigError, match="give gather_at='step'"):
        mesh.step(loss, SGD, gather_at="use", grad_accumulation=2, gradient_noise_scale=True)
