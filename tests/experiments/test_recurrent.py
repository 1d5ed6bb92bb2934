"""`experiments.examples.recurrent`: LSTMs with attention, given as a model of one's own."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples.recurrent import Recurrent
from experiments.harness.runs.run_options import load_members
from experiments.harness.training.build import build_model
from experiments.translation.presets import PRESETS
from experiments.translation.train import make_init_and_step
from jaxformer.decoding import beam_search
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from tests.experiments.tiny_runs import changed

pytestmark = pytest.mark.long

SIZES = jf.TransformerConfig(
    vocab_size=23, d_model=10, d_ff=14, num_heads=2, num_encoder_layers=1, num_decoder_layers=2
)
LENGTHS = (7, 3, 5)
MODEL = Recurrent(SIZES)


@pytest.fixture(scope="module")
def made(random_params):
    """The parameters of `MODEL`, a source [3, 7] of ragged lengths, and a target [3, 6]."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(3, 23, (3, length), np.int32) for length in (7, 6))
    source *= np.arange(7) < np.array(LENGTHS)[:, None]
    return random_params(MODEL, source, target), source, target


@jax.jit
def apply(params, *inputs):
    return MODEL.apply({"params": params}, *inputs)


def test_padding_of_the_source_changes_nothing(made):
    params, source, target = made
    logits = apply(params, source, target, source != 0)
    garbage = np.where(source == 0, 5, source)
    np.testing.assert_array_equal(apply(params, garbage, target, source != 0), logits)
    alone = apply(params, source[1:2, :3], target[1:2], source[1:2, :3] != 0)
    np.testing.assert_allclose(logits[1], alone[0], rtol=2e-5, atol=2e-6)


def test_a_best_translation_has_the_score_that_the_model_gives_it(made):
    params, source, _ = made
    config = jf.SearchConfig(beam_size=4, length_penalty=0.0, max_new_tokens=6)
    found = search(params, source, config)
    real = found.log_probs != 0.0
    assert (real.sum(axis=-1) > 3).all()
    for beam in range(4):
        tokens = found.tokens[:, beam]
        target = np.pad(tokens, ((0, 0), (1, 0)), constant_values=jf.BOS)[:, :-1]
        log_probs = jax.nn.log_softmax(apply(params, source, target, source != 0))
        chosen = np.take_along_axis(np.asarray(log_probs), tokens[..., None], -1)[..., 0]
        expected = np.sum(chosen * real[:, beam], axis=-1)
        np.testing.assert_allclose(found.scores[:, beam], expected, rtol=1e-4)


@partial(jax.jit, static_argnums=2)
def search(params, source, config):
    cache = MODEL.apply(
        {"params": params}, source, source != 0, max_length=6, num_beams=4, method="init_cache"
    )
    step = jf.make_step_fn(MODEL, params)
    return beam_search(step, cache, jnp.full(3, jf.BOS), jnp.full(3, 6), config)


def test_a_step_of_the_experiment_trains_all_its_parameters_with_dropout(made):
    _, source, target = made
    config = changed(
        replace(PRESETS["grammar"], model=replace(SIZES, dropout_rate=0.3)),
        training__model="experiments.examples.recurrent:Recurrent",
        training__label_smoothing=0.0,
    )
    model = build_model(config)
    assert model == Recurrent(config.model)
    batch = jf.PairBatch(source, np.pad(target, ((0, 0), (1, 0)), constant_values=1), np.arange(3))
    init, step = make_init_and_step(config, model, batch, single())
    state = single().init(init)
    params = jax.tree.map(np.asarray, state.params)  # the step donates its state
    log_probs = jax.nn.log_softmax(apply(params, source, batch.target[:, :-1], source != 0))
    without_dropout = -np.take_along_axis(np.asarray(log_probs), target[..., None], -1).mean()
    state, metrics = step(state, batch)
    assert abs(metrics["loss"] - without_dropout) > 1e-3
    moved = jax.tree.map(lambda old, new: np.any(old != new), params, state.params)
    assert all(jax.tree.leaves(moved)) and np.isfinite(metrics["grad_norm"])


def test_an_ensemble_of_two_kinds_of_models_is_refused():
    models = {"recurrent": MODEL, "transformer": jf.EncoderDecoder(SIZES)}

    def load(path):
        return SimpleNamespace(model=models[path.name], tokenizer=None, target_tokenizer=None)

    with pytest.raises(ConfigError, match="differ in their model"):
        load_members(load, "recurrent,transformer")
