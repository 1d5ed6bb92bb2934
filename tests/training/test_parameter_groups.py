"""Frozen parameters and learning rates by layer, on the parameters of real models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Learned, NormOptions, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.nn.stacking import stack_blocks, unstack_blocks
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameter_groups import freeze_gradient, scale_layers
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state, make_train_step

SMALL = TransformerConfig(
    vocab_size=11,
    d_model=6,
    d_ff=10,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=3,
    norm=NormOptions(placement="pre"),
    positions=Learned(),
    max_len=7,
)
FROZEN = "^encoder/|embedding"
BASE = OptimizerConfig("constant", learning_rate=0.1, warmup_steps=1, weight_decay=0.1)


@pytest.fixture
def params(random_params):
    ids = np.ones((2, 3), int)
    return random_params(EncoderDecoder(SMALL), ids, ids)


def updated(config, params, grads, steps=2):
    optimizer = make_optimizer(config)
    state, start = optimizer.init(params), params
    update = jax.jit(optimizer.update) if steps > 1 else optimizer.update
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    changes = jax.tree.map(lambda new, old: np.asarray(new - old), params, start)
    return flatten(params), flatten(changes), state


@pytest.mark.parametrize(
    "name",
    ["adam", "muon", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lion", "adafactor"))],
)
def test_frozen_parameters_keep_their_bits_and_have_no_state(name, random_params):
    params = random_params(DecoderOnly(replace(SMALL, num_decoder_layers=1)), np.ones((2, 3), int))
    grads = jax.tree.map(np.ones_like, params)
    config = replace(BASE, name=name, grad_clip_norm=1.0, freeze="feed_forward/|embedding")
    new, _, state = updated(config, params, grads, steps=1)
    frozen = {path for path in new if "feed_forward/" in path or "embedding" in path}
    for path, leaf in flatten(params).items():
        assert np.array_equal(new[path], leaf) == (path in frozen), path
    assert 4 < len(frozen) < len(new) - 4
    assert not any(path.endswith(tuple(frozen)) for path in flatten(state))


def test_what_is_trained_is_trained_as_if_the_rest_were_not_there(params):
    grads = jax.tree.map(np.ones_like, params)
    decoder = {"decoder": params["decoder"]}
    config = replace(BASE, grad_clip_norm=0.5)
    alone, _, _ = updated(config, decoder, {"decoder": grads["decoder"]})
    new, _, _ = updated(replace(config, freeze="^(?!decoder/)"), params, grads)
    for path, leaf in alone.items():
        np.testing.assert_array_equal(new[path], leaf)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("nowhere", "is found in no path of a parameter, such as decoder/blocks_0"),
        ("coder|embedding", "is found in every path"),
        ("query/kernel", "keeps a kernel but trains its bias .*query/bias"),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused(pattern, said, params):
    with pytest.raises(ConfigError, match=said):
        make_optimizer(replace(BASE, freeze=pattern)).init(params)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"freeze='\(' is not a regular expression"):
        replace(BASE, freeze="(")


def test_no_gradient_reaches_what_is_frozen(params):
    def loss(params, batch, rng):
        leaves = jax.tree.leaves(params)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.ones(())

    gradient = jax.grad(lambda params: freeze_gradient(loss, FROZEN)(params, None, None)[0])
    for path, leaf in flatten(gradient(params)).items():
        assert np.any(leaf) != (path.startswith("encoder/") or "embedding" in path), path


def scales_of(params, decay=0.5):
    ones = jax.tree.map(np.ones_like, params)
    updates, _ = scale_layers(decay).update(ones, scale_layers(decay).init(params))
    return {path: np.asarray(leaf) for path, leaf in flatten(updates).items()}


def test_the_learning_rate_halves_from_layer_to_layer_down_to_the_embeddings(params):
    expected = {
        "encoder/blocks_0/": 1 / 4,
        "encoder/blocks_1/": 1 / 2,
        "decoder/blocks_0/": 1 / 8,
        "decoder/blocks_1/": 1 / 4,
        "decoder/blocks_2/": 1 / 2,
        "embedding/": 1 / 16,
        "encoder/positions/": 1 / 16,
        "decoder/positions/": 1 / 16,
        "encoder/final_norm/": 1.0,
        "decoder/final_norm/": 1.0,
    }
    found = scales_of(params)
    for path, scale in found.items():
        (name,) = (name for name in expected if path.startswith(name))
        assert np.all(scale == expected[name]), path
    assert all(any(path.startswith(name) for path in found) for name in expected)


def test_stacked_blocks_have_the_rates_of_separate_ones(params):
    stacked = jax.tree.map(jnp.asarray, stack_blocks(params))
    ones = jax.tree.map(jnp.ones_like, stacked)
    updates, _ = scale_layers(0.5).update(ones, scale_layers(0.5).init(stacked))
    for path, leaf in flatten(unstack_blocks(updates)).items():
        np.testing.assert_array_equal(leaf, scales_of(params)[path])


def test_the_layers_count_also_where_some_are_frozen(params):
    config = replace(BASE, name="lion", weight_decay=0.0, layer_lr_decay=0.5)
    grads = jax.tree.map(np.ones_like, params)
    _, changes, _ = updated(replace(config, freeze="blocks_[12]/"), params, grads, steps=1)
    kernel = changes["decoder/blocks_0/feed_forward/up/kernel"]
    np.testing.assert_allclose(kernel, -0.1 / 8, rtol=1e-5)


def test_a_step_with_frozen_parameters_learns_with_the_others(random_params):

    model = DecoderOnly(replace(SMALL, scan_layers=True))
    batch = StreamBatch.create(np.random.default_rng(3).integers(0, 11, (4, 6)), vocab_size=11)
    params = jax.tree.map(jnp.asarray, random_params(model, batch.tokens[:, :-1]))
    optimizer = make_optimizer(replace(BASE, freeze="embedding|position", layer_lr_decay=0.9))
    loss = freeze_gradient(causal_loss(model), "embedding|position")
    step = jax.jit(make_train_step(loss, optimizer, grad_accumulation=2))
    state = init_train_state(params, optimizer, jax.random.key(1))
    losses = []
    for _ in range(7):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_equal(state.params["embedding"]["table"], params["embedding"]["table"])
