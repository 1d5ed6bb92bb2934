"""Schedule-free Adam: the average that is evaluated is optax's, and is kept in the state."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.errors import ConfigError
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import init_train_state, make_train_step

CONFIG = OptimizerConfig("constant", learning_rate=0.1, warmup_steps=3, weight_decay=0.1)
PARAMS = {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
TARGET = {"kernel": jnp.ones((2, 3)), "bias": jnp.arange(3.0)}


def loss(params, batch, rng):
    distances = jax.tree.map(lambda x, y: jnp.sum(jnp.square(x - y) * batch), params, TARGET)
    return sum(jax.tree.leaves(distances)), jnp.ones(())


def test_parameters_and_average_are_those_of_optax():
    optimizer = make_optimizer(replace(CONFIG, warmup_steps=0), schedule_free=True)
    peer = optax.contrib.schedule_free_adamw(
        0.1, b1=CONFIG.b1, b2=CONFIG.b2, eps=CONFIG.eps, weight_decay=0.1
    )
    params = {"kernel": PARAMS["kernel"]}  # optax decays biases too
    wanted = {"kernel": TARGET["kernel"]}

    def of_kernel(params, batch, rng):
        return jnp.sum(jnp.square(params["kernel"] - wanted["kernel"])), jnp.ones(())

    step = jax.jit(make_train_step(of_kernel, optimizer))
    state = init_train_state(params, optimizer, jax.random.key(0))
    np.testing.assert_array_equal(state.ema["kernel"], params["kernel"])
    peer_state, update = peer.init(params), jax.jit(peer.update)
    for _ in range(5):
        state, _ = step(state, jnp.ones(()))
        grads = jax.grad(lambda p: of_kernel(p, None, None)[0])(params)
        updates, peer_state = update(grads, peer_state, params)
        params = optax.apply_updates(params, updates)
    average = optax.contrib.schedule_free_eval_params(peer_state, params)
    np.testing.assert_allclose(state.params["kernel"], params["kernel"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.ema["kernel"], average["kernel"], rtol=1e-5, atol=1e-6)
    assert np.abs(state.ema["kernel"] - state.params["kernel"]).max() > 1e-3


def test_the_average_comes_near_the_target_at_a_constant_rate():
    optimizer = make_optimizer(replace(CONFIG, weight_decay=0.0), schedule_free=True)
    step = jax.jit(make_train_step(loss, optimizer))
    state = init_train_state(PARAMS, optimizer, jax.random.key(0))
    for _ in range(300):
        state, _ = step(state, jnp.ones(()))
    for found, wanted in zip(*map(jax.tree.leaves, (state.ema, TARGET)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.05)


def test_the_peak_learning_rate_stays_data_of_the_program():
    optimizer = make_optimizer(CONFIG, learning_rate=jnp.asarray(0.3), schedule_free=True)
    other = make_optimizer(replace(CONFIG, learning_rate=0.3), schedule_free=True)
    step = jax.jit(make_train_step(loss, optimizer))
    found = [
        step(init_train_state(PARAMS, one, jax.random.key(0)), jnp.ones(()))[0].params["kernel"]
        for one in (optimizer, other)
    ]
    np.testing.assert_array_equal(*found)


def test_a_skipped_step_keeps_the_average():
    optimizer = make_optimizer(CONFIG, schedule_free=True)
    state = init_train_state(PARAMS, optimizer, jax.random.key(0))
    new, metrics = make_train_step(loss, optimizer)(state, jnp.asarray(np.nan))
    assert metrics["skipped"] == 1
    for one, other in zip(jax.tree.leaves(new.ema), jax.tree.leaves(state.ema), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "lion"}, "schedule_free needs name='adam', got 'lion'"),
        ({"schedule": "linear"}, "schedule_free needs schedule='constant', got 'linear'"),
        ({"freeze": "bias"}, "schedule_free needs freeze='', got 'bias'"),
        ({"b1": 0.0}, "schedule_free needs b1 above 0"),
    ],
)
def test_what_does_not_fit_it_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        make_optimizer(replace(CONFIG, **changes), schedule_free=True)


def test_a_moving_average_beside_it_is_refused():
    optimizer = make_optimizer(CONFIG, schedule_free=True)
    state = init_train_state(PARAMS, optimizer, jax.random.key(0))
    with pytest.raises(ConfigError, match="a schedule-free optimizer has an average of its own"):
        make_train_step(loss, optimizer, ema_decay=0.9)(state, jnp.ones(()))
