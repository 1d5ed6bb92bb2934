"""Schedules against the paper's equation, updates against Adam written out in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.models import EncoderDecoder
from jaxformer.optimizer import (
    OptimizerConfig,
    decay_mask,
    inverse_square_root,
    make_optimizer,
    make_schedule,
    paper_learning_rate,
)

close = partial(np.testing.assert_allclose, rtol=1e-5)


@pytest.mark.parametrize("d_model, warmup", [(512, 4_000), (1024, 300), (7, 1)])
def test_the_schedule_is_equation_3_of_the_paper(d_model, warmup):
    peak = paper_learning_rate(d_model, warmup)
    config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup)
    for schedule in (make_schedule(config), inverse_square_root(peak, warmup)):
        for step in (1, 2, 299, 300, 301, 4_000, 4_001, 100_000):
            expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
            # The first update, step 1 of the paper, comes after none.
            close(schedule(jnp.asarray(step - 1)), expected)


def test_the_base_models_peak_is_seven_ten_thousandths():
    close(paper_learning_rate(512, 4_000), 6.99e-4, rtol=1e-3)


def test_a_cosine_rises_over_the_warm_up_and_ends_at_its_final_fraction():
    config = OptimizerConfig(
        "cosine", learning_rate=0.3, warmup_steps=10, total_steps=110, final_fraction=0.2
    )
    schedule = make_schedule(config)
    for number, rate in [
        (1, 0.03),
        (5, 0.15),
        (10, 0.3),
        (35, 0.06 + 0.24 * (1 + 0.5**0.5) / 2),
        (60, 0.18),
        (110, 0.06),
        (500, 0.06),
    ]:
        close(schedule(number - 1), rate)


def test_a_constant_rate_is_reached_by_the_warm_up_and_kept():
    schedule = make_schedule(OptimizerConfig("constant", learning_rate=0.3, warmup_steps=3))
    close([schedule(count) for count in range(5)], [0.1, 0.2, 0.3, 0.3, 0.3])


@pytest.mark.parametrize("name", ["inverse_square_root", "cosine", "constant"])
def test_without_warm_up_the_first_update_is_made_at_the_full_rate(name):
    config = OptimizerConfig(name, learning_rate=0.3, warmup_steps=0, total_steps=50)
    close(make_schedule(config)(0), 0.3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"schedule": "linear"}, "schedule='linear' is unknown: give one of inverse_square_root"),
        ({"warmup_steps": -1}, "warmup_steps=-1, but it must be at least 0"),
        (
            {"schedule": "cosine", "total_steps": 4_000},
            "total_steps=4000 leaves a cosine nothing after warmup_steps=4000",
        ),
        ({"schedule": "cosine", "total_steps": 1, "warmup_steps": 0}, "total_steps=1 leaves"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**changes)


def adam_by_hand(config, params, gradients):
    """Clip by the norm over all leaves, then Adam (Kingma & Ba 2015, algorithm 1), then decay."""
    moments = {name: (0.0, 0.0) for name in params}
    for number, gradient in enumerate(gradients, start=1):
        norm = np.sqrt(sum((leaf**2).sum() for leaf in gradient.values()))
        shrink = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        rate = config.learning_rate * min(number / config.warmup_steps, 1.0)
        for name, leaf in gradient.items():
            m, v = moments[name]
            m = config.b1 * m + (1 - config.b1) * leaf * shrink
            v = config.b2 * v + (1 - config.b2) * (leaf * shrink) ** 2
            moments[name] = m, v
            update = m / (1 - config.b1**number)
            update = update / (np.sqrt(v / (1 - config.b2**number)) + config.eps)
            if name == "kernel":
                update = update + config.weight_decay * params[name]
            params = {**params, name: params[name] - rate * update}
    return params


@pytest.mark.parametrize("clip_norm, weight_decay", [(0.0, 0.0), (0.7, 0.0), (0.7, 0.1)])
def test_updates_are_adams_on_clipped_gradients_with_decay_beside(clip_norm, weight_decay):
    config = OptimizerConfig(
        "constant",
        learning_rate=0.03,
        warmup_steps=2,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
    )
    rng = np.random.default_rng(13)
    shapes = {"kernel": (5, 3), "bias": (3,)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    # Norms from far below to far above the clip: clipped after Adam, all would count alike.
    gradients = [
        {name: size * rng.normal(size=shape) for name, shape in shapes.items()}
        for size in (0.01, 50.0, 0.3, 2.0)
    ]
    optimizer = make_optimizer(config)
    current = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    state, update = optimizer.init(current), jax.jit(optimizer.update)
    for gradient in gradients:
        gradient = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradient)
        updates, state = update(gradient, state, current)
        current = optax.apply_updates(current, updates)
    expected = adam_by_hand(config, params, gradients)
    for name in shapes:
        close(current[name], expected[name], atol=1e-6)


def test_decay_touches_matrices_and_tables_and_nothing_else():
    config = TransformerConfig(
        vocab_size=11,
        d_model=6,
        d_ff=13,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        positions="learned",
    )
    tokens = jnp.ones((2, 3), jnp.int32)
    shapes = jax.eval_shape(EncoderDecoder(config).init, jax.random.key(0), tokens, tokens)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes["params"])
    optimizer = make_optimizer(
        OptimizerConfig("constant", learning_rate=0.5, warmup_steps=0, weight_decay=0.2)
    )
    nothing = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(nothing, optimizer.init(params), params)
    decayed = set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = path[-1].key
        assert np.allclose(update, -0.1 if name in ("kernel", "table") else 0.0)
        decayed.add((name, bool(np.any(update))))
    assert decayed == {("kernel", True), ("table", True), ("bias", False), ("scale", False)}
    assert jax.tree.structure(decay_mask(params)) == jax.tree.structure(params)
