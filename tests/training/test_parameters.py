"""Parameters by path, and frozen ones, on those of real models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Learned
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten, freeze_gradient, map_with_path
from tests.configs import small

SMALL = small(
    num_encoder_layers=1, num_decoder_layers=1, norm__placement="pre", positions=Learned()
)
FROZEN = "^encoder/|embedding"
BASE = OptimizerConfig("constant", learning_rate=0.1, warmup_steps=1, weight_decay=0.1)


@pytest.fixture(scope="module")
def params(random_params):
    ids = np.ones((2, 3), int)
    return random_params(EncoderDecoder(SMALL), ids, ids)


@pytest.fixture(scope="module")
def axes():
    return parameter_axes(EncoderDecoder(SMALL))


def updated(config, params, grads, axes, steps=2):
    """Parameters by path after these steps, and the optimizer's state."""
    optimizer = make_optimizer(config, axes=axes)

    @jax.jit
    def run(params, grads):
        state = optimizer.init(params)
        for _ in range(steps):
            updates, state = optimizer.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return params, state

    params, state = run(params, grads)
    return flatten(params), state


@pytest.mark.parametrize(
    "name",
    ["adam", "muon", pytest.param("lion", marks=pytest.mark.long)],
)
def test_frozen_parameters_are_unchanged_and_have_no_state(name, random_params):
    model = DecoderOnly(SMALL)
    params, axes = random_params(model, np.ones((2, 3), int)), parameter_axes(model)
    grads = jax.tree.map(np.ones_like, params)
    config = replace(BASE, name=name, grad_clip_norm=1.0, freeze="feed_forward/|embedding")
    new, state = updated(config, params, grads, axes, steps=1)
    frozen = {path for path in new if "feed_forward/" in path or "embedding" in path}
    for path, leaf in flatten(params).items():
        assert np.array_equal(new[path], leaf) == (path in frozen), path
    assert 4 < len(frozen) < len(new) - 4
    assert not any(path.endswith(tuple(frozen)) for path in flatten(state))


def test_what_is_trained_is_trained_as_if_the_rest_were_not_there(params, axes):
    grads = jax.tree.map(np.ones_like, params)
    decoder = {"decoder": params["decoder"]}
    config = replace(BASE, grad_clip_norm=0.5)
    alone, _ = updated(config, decoder, {"decoder": grads["decoder"]}, axes)
    new, _ = updated(replace(config, freeze="^(?!decoder/)"), params, grads, axes)
    for path, leaf in alone.items():
        np.testing.assert_array_equal(new[path], leaf)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("nowhere", "matches no path of a parameter, such as decoder/blocks_0"),
        ("coder|embedding", "matches every path"),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused(pattern, said, params, axes):
    with pytest.raises(ConfigError, match=said):
        make_optimizer(replace(BASE, freeze=pattern), axes=axes).init(params)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"freeze='\('"):
        replace(BASE, freeze="(")


def test_no_gradient_reaches_what_is_frozen(params):
    def loss(params, batch, rng):
        leaves = jax.tree.leaves(params)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.ones(())

    gradient = jax.grad(lambda params: freeze_gradient(loss, FROZEN)(params, None, None)[0])
    for path, leaf in flatten(jax.jit(gradient)(params)).items():
        assert np.any(leaf) != (path.startswith("encoder/") or "embedding" in path), path


def test_a_pytree_is_flattened_by_path():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert flatten((5, [7, None, 11])) == {"0": 5, "1/0": 7, "1/2": 11}
    doubled = map_with_path(lambda path, leaf: f"{path}={leaf}", tree)
    assert doubled == {"a": {"b": "a/b=1", "c": {"d": "a/c/d=2"}}, "e": "e=3"}
