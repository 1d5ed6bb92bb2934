"""Speculative decoding writes the large model's greedy text, whatever the small model proposes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples import linear_attention
from experiments.examples.speculative import main, speculate, write_greedily
from tests.configs import small

pytestmark = pytest.mark.long

B, P, L = 3, 5, 19
CONFIG = small(
    vocab_size=17,
    num_decoder_layers=2,
    norm__placement="pre",
    embeddings__tied="none",  # or a text repeats a token
    positions=jf.Rotary(),
    max_len=53,
)
LARGE = jf.DecoderOnly(CONFIG)
SMALL = jf.DecoderOnly(dataclasses.replace(CONFIG, num_decoder_layers=1, d_model=6, d_ff=7))
PROMPTS = np.random.default_rng(2).integers(0, 17, (B, P), np.int32)


@pytest.fixture(scope="module")
def models(random_params):
    return LARGE, random_params(LARGE, PROMPTS), SMALL, random_params(SMALL, PROMPTS)


@pytest.fixture(scope="module")
def greedy(models):
    write = jax.jit(write_greedily, static_argnums=(0, 3))
    return np.asarray(write(LARGE, models[1], jnp.asarray(PROMPTS), L))


@pytest.mark.parametrize("guesses", [1, 2, 5])
def test_the_text_is_the_large_models_own(guesses, models, greedy):
    written = speculate(*models, PROMPTS, max_new_tokens=L, guesses=guesses)
    assert np.array_equal(written.tokens, greedy)
    assert (written.accepted < written.proposed).all(), "or it proves nothing"
    assert len(np.unique(greedy)) > 2, "or it proves nothing"


def test_a_small_model_that_is_the_large_one_is_always_right(models, greedy):
    large, params, *_ = models
    written = speculate(large, params, large, params, PROMPTS, max_new_tokens=L, guesses=4)
    assert np.array_equal(written.tokens, greedy)
    # Each call writes five tokens; of the last one only the first four count.
    assert written.calls == 4
    assert written.proposed.tolist() == [16] * B and written.accepted.tolist() == [16] * B


def test_a_text_ends_at_eos_and_the_others_go_on(models, greedy):
    eos = int(greedy[1, 7])
    written = speculate(*models, PROMPTS, max_new_tokens=L, guesses=3, eos=eos)
    for row, expected in zip(written.tokens, greedy, strict=True):
        found = np.flatnonzero(expected == eos)
        length = found[0] + 1 if len(found) else L
        assert np.array_equal(row[:length], expected[:length]) and not row[length:].any()


def test_a_prompt_of_one_token_and_a_text_of_one_token(models):
    first, write = PROMPTS[:, :1], jax.jit(write_greedily, static_argnums=(0, 3))
    written = speculate(*models, first, max_new_tokens=1, guesses=3)
    assert np.array_equal(written.tokens, write(LARGE, models[1], jnp.asarray(first), 1))
    assert written.calls == 1


def test_models_that_cannot_speculate_together_are_refused(models):
    large, params, *_ = models
    other = jf.DecoderOnly(dataclasses.replace(CONFIG, vocab_size=19))
    run = partial(speculate, prompts=PROMPTS, max_new_tokens=L)
    with pytest.raises(jf.ConfigError, match="17 ids .* 19"):
        run(large, params, other, params)
    recurrent = jf.DecoderOnly(CONFIG, block=linear_attention.alternating)
    with pytest.raises(jf.ConfigError, match="take tokens back"):
        run(large, params, recurrent, params)


def test_the_example_writes_one_text_in_both_ways_with_fewer_calls(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("sun moon star rain. " * 101)
    sizes = "--steps 60 --batch_size 5 --length 19 --d_model 24 --layers 2 --small_d_model 12"
    speeds = main([str(path), *sizes.split(), *"--characters 31 --learning_rate 1e-2".split()])
    out = capsys.readouterr().out
    assert "the same text" in out and speeds["accepted"] > 0.2
    calls = int(out.split(" calls, the same text")[0].split()[-1])
    assert 31 / 5 <= calls < 31
