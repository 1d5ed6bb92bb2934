"""A program that trains and decodes small models of presets in a JAX without Triton.

`python -m tests.without_triton NAME ...`; without a name all of them.
"""

# ruff: noqa: E402  (the backend is hidden before anything imports it)
import sys

BACKEND = "jax.experimental.pallas.triton"


class Hidden:
    """A finder that raises what a JAX without Pallas' Triton backend raises."""

    def find_spec(self, name, path=None, target=None):
        if name == BACKEND:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())

import jax
import numpy as np

import jaxformer as jf
from jaxformer.decoding import SamplerInputs
from jaxformer.pipelines import translate_ids
from tests.training.test_first_losses import LENGTH, PRESETS, VOCAB, measured, small_config


def check_training(name, preset):
    """The loss of a step and the norm of its gradient are finite."""
    found = measured(preset)
    assert np.isfinite([found["loss"], found["grad_norm"]]).all(), (name, found)


def check_decoding(name, preset):
    """The log-probabilities of what a model writes are finite."""
    config = small_config(preset.model)
    if not config.num_decoder_layers:
        return
    ids = np.random.default_rng(5).integers(4, VOCAB, (3, 5), np.int32)
    limits = np.full(3, LENGTH - 6, np.int32)
    if config.num_encoder_layers:
        model = jf.EncoderDecoder(config)
        params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
        search = jf.SearchConfig(max_new_tokens=LENGTH - 6)
        found = translate_ids(model, params, ids, limits, search)
    else:
        model = jf.DecoderOnly(config)
        params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
        cache = model.apply({"params": params}, 3, max_length=LENGTH, method="init_cache")
        prompts = SamplerInputs(ids[:, -1], limits, example_ids=np.arange(3))
        sampling = jf.SamplingConfig(max_new_tokens=LENGTH - 6)
        step = jf.make_step_fn(model, params)
        found = jax.jit(jf.sample, static_argnums=4)(
            step, cache, prompts, jax.random.key(0), sampling
        )
    assert np.isfinite(found.log_probs).all(), name


if __name__ == "__main__":
    names = sys.argv[1:] or [*PRESETS]
    for name in names:
        check_training(name, PRESETS[name])
        check_decoding(name, PRESETS[name])
    assert BACKEND not in sys.modules
    print(len(names), "presets")
