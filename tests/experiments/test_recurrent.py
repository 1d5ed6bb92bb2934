"""`experiments.examples.recurrent`: LSTMs with attention, given as a model of one's own."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples.recurrent import Recurrent
from experiments.harness.runs.decoding_options import load_members
from experiments.translation import load_run, train
from jaxformer.decoding import beam_search
from jaxformer.errors import ConfigError
from jaxformer.training.losses import seq2seq_loss
from tests.experiments.tiny_runs import changed, translation_config

pytestmark = pytest.mark.long

SIZES = jf.TransformerConfig(
    vocab_size=23, d_model=10, d_ff=14, num_heads=2, num_encoder_layers=1, num_decoder_layers=2
)
LENGTHS = (7, 3, 5)
RECURRENT = "experiments.examples.recurrent:Recurrent"


def ids(seed, rows, length):
    return jax.random.randint(jax.random.key(seed), (rows, length), 3, SIZES.vocab_size)


@pytest.fixture(scope="module")
def made():
    """A model, its parameters, a source [3, 7] of ragged lengths, and a target [3, 6]."""
    model = Recurrent(SIZES)
    source = ids(0, 3, 7) * (np.arange(7) < np.array(LENGTHS)[:, None])
    target = ids(1, 3, 6)
    params = jax.jit(model.init)(jax.random.key(2), source, target)["params"]
    return model, params, source, target


@partial(jax.jit, static_argnums=0)
def apply(model, params, *inputs):
    return model.apply({"params": params}, *inputs)


def test_padding_of_the_source_changes_nothing(made):
    model, params, source, target = made
    logits = apply(model, params, source, target, source != 0)
    for row, length in enumerate(LENGTHS):
        alone = apply(model, params, source[row : row + 1, :length], target[row][None])
        np.testing.assert_allclose(logits[row], alone[0], rtol=2e-5, atol=2e-6)


def test_a_token_does_not_depend_on_later_ones(made):
    model, params, source, target = made
    logits = apply(model, params, source, target)
    other = apply(model, params, source, target.at[:, 4].add(1))
    np.testing.assert_array_equal(logits[:, :4], other[:, :4])
    assert np.abs(logits[:, 4:] - other[:, 4:]).max() > 1e-4


def test_a_best_translation_has_the_score_that_the_model_gives_it(made):
    model, params, source, _ = made
    config = jf.SearchConfig(beam_size=4, length_penalty=0.0, max_new_tokens=9)
    found = search(model, params, source, config)
    for beam in range(4):
        tokens = found.tokens[:, beam]
        target = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=jf.BOS)[:, :-1]
        logits = apply(model, params, source, target, source != 0)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
        real = found.log_probs[:, beam] != 0.0
        assert real.sum() > 3
        expected = jnp.sum(chosen * real, axis=-1)
        np.testing.assert_allclose(found.scores[:, beam], expected, rtol=1e-4)


@partial(jax.jit, static_argnums=(0, 3))
def search(model, params, source, config):
    cache = model.apply(
        {"params": params}, source, source != 0, max_length=9, num_beams=4, method="init_cache"
    )
    step = jf.make_step_fn(model, params)
    return beam_search(step, cache, jnp.full(3, jf.BOS), jnp.full(3, 9), config)


def test_dropout_changes_the_loss_and_its_gradient_is_finite(made):
    model, params, source, target = made
    model = Recurrent(jf.TransformerConfig(**{**vars(SIZES), "dropout_rate": 0.3}))
    batch = jf.PairBatch.create(source, target, vocab_size=23)
    loss = seq2seq_loss(model, pad=jf.PAD)
    plain = jax.jit(loss)(params, batch, None)[0]
    dropped, gradient = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, jax.random.key(3))[0]))(
        params
    )
    assert abs(float(plain - dropped)) > 1e-3
    sizes = jax.tree.map(lambda leaf: float(jnp.abs(leaf).sum()), gradient)
    assert all(0 < size < 1e6 for size in jax.tree.leaves(sizes)), sizes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of a run of the recurrent model, and of a Transformer of the same sizes."""
    config = translation_config(
        tmp_path_factory.mktemp("recurrent"), name="transformer", model__positions=jf.Sinusoidal()
    )
    train.train(config)
    train.train(changed(config, name="recurrent", training__model=RECURRENT))
    return Path(config.runs) / "translation"


def test_every_command_uses_the_model_of_the_run(runs):
    trained = load_run.load_run(runs / "recurrent")
    assert type(trained.model) is Recurrent
    assert json.loads((runs / "recurrent" / "scores.json").read_text())["chrf"] >= 0
    loaded = jf.load(runs / "recurrent")
    source, target = np.array([[5, 6, 2], [7, 2, 0]]), np.array([[1, 9], [1, 8]])
    np.testing.assert_array_equal(
        loaded.model.apply({"params": loaded.params}, source, target),
        Recurrent(trained.model.config).apply({"params": trained.params}, source, target),
    )


def test_an_ensemble_of_two_kinds_of_models_is_refused(runs):
    both = f"{runs}/recurrent,{runs}/transformer"
    with pytest.raises(ConfigError, match="differ in their model"):
        load_members(load_run.load_run, both)
