"""Schedules against the paper's equation, updates against each rule written out in numpy."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import EmbeddingOptions, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly
from jaxformer.training.muon import NS_COEFFS, orthogonalize
from jaxformer.training.optimizer import (
    OptimizerConfig,
    make_optimizer,
    make_schedule,
    noam_peak_learning_rate,
)

close = partial(np.testing.assert_allclose, rtol=1e-5)
RULES = ["adam", "muon", "lion"]


@pytest.mark.parametrize("d_model, warmup", [(512, 4_000), (1024, 300), (7, 1)])
def test_the_schedule_is_equation_3_of_the_paper(d_model, warmup):
    peak = noam_peak_learning_rate(d_model, warmup)
    config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup)
    schedule = make_schedule(config)
    for step in (1, 2, 299, 300, 301, 4_000, 4_001, 100_000):
        expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        # The first update, step 1 of the paper, comes after none.
        close(schedule(jnp.asarray(step - 1)), expected)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        (
            {"schedule": "linear"},
            {1: 0.03, 10: 0.3, 35: 0.3 - 0.24 / 4, 60: 0.18, 110: 0.06, 500: 0.06},
        ),
        (
            {"schedule": "wsd", "decay_fraction": 0.4},
            {1: 0.03, 10: 0.3, 66: 0.3, 77: 0.24, 88: 0.18, 110: 0.06, 500: 0.06},
        ),
        (
            {"schedule": "cosine"},
            {1: 0.03, 5: 0.15, 10: 0.3, 35: 0.06 + 0.12 * (1 + 0.5**0.5), 60: 0.18, 500: 0.06},
        ),
        ({"schedule": "constant"}, {1: 0.03, 5: 0.15, 10: 0.3, 11: 0.3, 500: 0.3}),
    ],
    ids=["linear", "wsd", "cosine", "constant"],
)
def test_a_schedule_has_these_rates(changes, rates):
    config = OptimizerConfig(
        learning_rate=0.3, warmup_steps=10, total_steps=110, min_lr_ratio=0.2, **changes
    )
    schedule = make_schedule(config)
    close([schedule(jnp.asarray(number - 1)) for number in rates], list(rates.values()))


@pytest.mark.parametrize("name", ["inverse_square_root", "cosine", "constant"])
def test_without_warm_up_the_first_update_is_made_at_the_full_rate(name):
    config = OptimizerConfig(name, learning_rate=0.3, warmup_steps=0, total_steps=50)
    close(make_schedule(config)(0), 0.3)


@pytest.mark.parametrize("name", ["inverse_square_root", "cosine", "constant"])
def test_one_compiled_update_serves_all_learning_rates(name):
    base = OptimizerConfig(name, warmup_steps=3, total_steps=11)
    update = jax.jit(make_optimizer(base).update)
    params = {"kernel": jnp.linspace(-1.0, 0.9, 36).reshape(9, 4)}
    for peak in (0.3, 0.02, 1e-4):
        config = replace(base, learning_rate=peak)
        schedule, sign = make_schedule(config), jnp.sign(params["kernel"])
        state = make_optimizer(config).init(params)
        for count in range(5):
            updates, state = update(params, state)
            close(updates["kernel"], -schedule(count) * sign, rtol=1e-4)
    assert update._cache_size() == 1


def test_a_schedule_of_ones_own_decides_the_rate_alone():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.3), lambda count: 0.5 / (count + 1))
    params = {"kernel": jnp.ones((5, 3))}
    update = jax.jit(optimizer.update)
    updates, state = update(params, optimizer.init(params))
    close(updates["kernel"], -0.5)
    close(update(params, state)[0]["kernel"], -0.25)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"schedule": "square"}, "schedule='square'"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        (
            {"schedule": "wsd", "total_steps": 4_999},
            "total_steps=4999",
        ),
        (
            {"schedule": "cosine", "total_steps": 4_000},
            "total_steps=4000",
        ),
        (
            {"schedule": "cosine", "total_steps": 1, "warmup_steps": 0},
            "total_steps=1 leaves",
        ),
        ({"name": "sgd"}, "name='sgd'"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"b1": 1.0}, "b1=1.0"),
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
        shrink = min(1.0, config.grad_clip_norm / norm) if config.grad_clip_norm else 1.0
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


@pytest.mark.parametrize("grad_clip_norm, weight_decay", [(0.0, 0.0), (0.7, 0.0), (0.7, 0.1)])
def test_updates_are_adams_on_clipped_gradients_with_decay_beside(grad_clip_norm, weight_decay):
    config = OptimizerConfig(
        "constant",
        learning_rate=0.03,
        warmup_steps=2,
        grad_clip_norm=grad_clip_norm,
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


@pytest.fixture(scope="module")
def gpt():
    """The parameters of a decoder-only model, and two gradients of their shape."""
    config = TransformerConfig(
        vocab_size=11,
        d_model=14,
        d_ff=13,
        num_heads=2,
        head_dim=3,
        num_decoder_layers=1,
        embeddings=EmbeddingOptions(tied="none"),
    )
    tokens = jnp.ones((2, 3), jnp.int32)
    shapes = jax.eval_shape(DecoderOnly(config).init, jax.random.key(0), tokens)["params"]
    rng = np.random.default_rng(5)

    def draw():
        return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)

    return draw(), [draw(), draw()], parameter_axes(DecoderOnly(config))


def updates_of(config, params, gradients, axes):
    """The updates that each of `gradients` would make, as {"path/of/leaf": array}."""
    optimizer = make_optimizer(config, axes=axes)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        yield {"/".join(part.key for part in path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("name", RULES)
def test_the_schedule_is_that_of_every_rule(gpt, name):
    config = OptimizerConfig("constant", name, learning_rate=0.3, warmup_steps=3)
    rising, full = updates_of(config, *gpt), updates_of(replace(config, warmup_steps=0), *gpt)
    for number, (low, high) in enumerate(zip(rising, full, strict=True), start=1):
        for path in low:
            close(low[path], high[path] * number / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ns_coeffs", "of_optax"),
    [
        ("standard", "standard"),
        ("dion", "dion"),
        ("polar_express", NS_COEFFS["polar_express"]),
    ],
)
def test_muon_of_a_matrix_is_that_of_optax_with_all_heads_in_one(gpt, ns_coeffs, of_optax):
    params, gradients, axes = gpt
    config = OptimizerConfig(
        "constant",
        "muon",
        learning_rate=0.3,
        warmup_steps=0,
        momentum=0.9,
        ns_coeffs=ns_coeffs,
    )
    shapes = {
        "decoder/blocks_0/attention/query/kernel": (14, 6),
        "decoder/blocks_0/attention/out/kernel": (6, 14),
        "decoder/blocks_0/feed_forward/down/kernel": (13, 14),
    }
    flat = [
        {path: leaf_at(tree, path).reshape(shapes[path]) for path in shapes} for tree in gradients
    ]
    muon = optax.contrib.muon(0.3, of_optax, beta=0.9, consistent_rms=0.2)
    state, update = muon.init(flat[0]), jax.jit(muon.update)
    for ours, gradient in zip(updates_of(config, params, gradients, axes), flat, strict=True):
        theirs, state = update(gradient, state, gradient)
        for path in shapes:
            # Its iteration multiplies what two ways of compiling round differently.
            close(ours[path].reshape(shapes[path]), theirs[path], atol=1e-5)


@pytest.mark.parametrize(
    ("ns_coeffs", "least", "largest"),
    [("standard", 0.68, 1.21), ("dion", 0.97, 1.15), ("polar_express", 0.87, 1.13)],
)
def test_singular_values_are_in_the_range_that_the_help_states(ns_coeffs, least, largest):
    small = np.geomspace(1 / 300, 1, 97)
    pairs = np.stack([np.ones(97), small], axis=1).astype(np.float32)
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0][:2]
    matrices = np.float32(pairs[:, :, None] * turn)
    results = np.asarray(orthogonalize(matrices, NS_COEFFS[ns_coeffs]))
    values = np.linalg.svd(results, compute_uv=False)
    assert least < values.min() < least + 0.01 and largest - 0.01 < values.max() < largest
    assert f"{least} to {largest} by {ns_coeffs}" in inspect.getsource(OptimizerConfig)


def test_lion_goes_by_the_sign_of_a_mean_and_remembers_with_another():
    config = OptimizerConfig(
        "constant", "lion", learning_rate=0.03, warmup_steps=0, b1=0.9, b2=0.7, weight_decay=0.1
    )
    rng = np.random.default_rng(17)
    params = {"kernel": rng.normal(size=(5, 3)).astype(np.float32)}
    gradients = [{"kernel": rng.normal(size=(5, 3)).astype(np.float32)} for _ in range(3)]
    memory = 0.0
    found = updates_of(config, params, gradients, {})
    for updates, gradient in zip(found, gradients, strict=True):
        sign = np.sign(0.9 * memory + 0.1 * gradient["kernel"])
        memory = 0.7 * memory + 0.3 * gradient["kernel"]
        close(updates["kernel"], -0.03 * (sign + 0.1 * params["kernel"]))


def leaf_at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree
