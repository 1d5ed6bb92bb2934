"""Processors of one's own in a search, and edges of its options; tests/peers has the options."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import (
    SamplerInputs,
    SamplingConfig,
    SearchConfig,
    beam_search,
    force_token_at,
    no_repeat_ngram,
    sample,
)
from tests.decoding.test_decoding import NoMemory, close

END, START, A, B = range(4)
with np.errstate(divide="ignore"):
    LOOP = np.log([[1, 0, 0, 0], [0.1, 0, 0.6, 0.3], [0.2, 0, 0.5, 0.3], [0.3, 0, 0.4, 0.3]])
LOOP = np.float32(LOOP + np.array([[0.0], [1.0], [-2.0], [0.5]]))
"""The logits of a Markov model after end, start, a and b."""
PLAIN = {"beam_size": 2, "max_new_tokens": 5, "length_penalty": 0.0, "eos": (END,)}


def search(limits=(3, 3), logits_processors=(), bos=START, **settings):
    """The texts that a beam of 2 finds after `bos`, with their probabilities."""
    config = SearchConfig(**PLAIN | settings)
    first, processors = np.full(len(limits), bos), tuple(logits_processors)
    found = _search(first, np.array(limits), config, processors)
    found = jax.device_get(found)
    return found.tokens.tolist(), np.exp(found.log_probs.sum(axis=-1))


@partial(jax.jit, static_argnames=("config", "processors"))
def _search(first, limits, config, processors):
    return beam_search(
        lambda tokens, cache: (jnp.asarray(LOOP)[tokens], cache),
        NoMemory(),
        first,
        limits,
        config,
        logits_processors=processors,
    )


def test_a_processor_knows_how_often_the_hypothesis_holds_each_token():
    def new(logits, history):
        return jnp.where((history.token_counts > 0) & (jnp.arange(4) > START), -jnp.inf, logits)

    tokens, probabilities = search(beam_size=3, logits_processors=[new])
    texts = [[END, 0, 0, 0, 0], [A, B, END, 0, 0], [A, END, 0, 0, 0]]
    assert sorted(tokens[0]) == sorted(texts)
    close(np.sort(probabilities[0]), np.sort([0.1, 0.6 * 0.3 * 0.3, 0.6 * 0.2]))


def greedy_texts(first, limits, eos, logits_processors=(), **settings):
    """The likeliest tokens after `first`, one at a time."""

    @jax.jit
    def run(logits, prompts, rng):
        config = SamplingConfig(max_new_tokens=max(limits), temperature=0, **settings)
        options = {"eos": eos, "logits_processors": logits_processors}

        def step(tokens, cache):
            return logits[tokens], cache

        return sample(step, NoMemory(), prompts, rng, config, **options)

    prompts = SamplerInputs(np.array(first), np.array(limits), np.arange(2))
    found = jax.device_get(run(LOOP, prompts, jax.random.key(0)))
    return found.tokens[:, 0].tolist()


def test_a_forced_token_is_drawn_by_sampling_too():
    forced = [force_token_at(B), force_token_at(END, index=2)]
    assert greedy_texts([START, START], [3, 3], (END,), forced) == [[B, A, END]] * 2


def test_a_forced_token_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"tokens \[4\]"):
        search(forced_bos=4)


@pytest.mark.parametrize(
    ("size", "bos", "text"),
    [
        (1, START, [A, B, END, 0, 0, 0, 0]),
        (1, A, [B, END, 0, 0, 0, 0, 0]),
        (3, START, [A, A, A, B, A, A, END]),
        (8, START, [A, A, A, A, A, A, END]),
    ],
)
def test_a_run_of_tokens_is_not_repeated(size, bos, text):
    values = {"beam_size": 1, "limits": (7, 7), "max_new_tokens": 7, "bos": bos}
    tokens, _ = search(no_repeat_ngram_size=size, **values)
    assert tokens == [[text]] * 2


def test_a_run_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="size=0"):
        no_repeat_ngram(0)


def test_any_of_several_ends_ends_a_sampled_text():
    found = greedy_texts([START, A], [4, 3], (END, A), min_new_tokens=1)
    assert found == [[B, A, 0, 0], [B, A, 0, 0]]


def test_the_token_before_a_text_counts_as_repeated():
    def penalize(logits, history):
        return jnp.where(history.token_counts > 0, 3.0 * logits, logits)

    for bos, best in ((START, A), (A, B)):
        values = {"beam_size": 1, "limits": (1, 1), "at_max_length": "cut", "bos": bos}
        tokens, _ = search(logits_processors=[penalize], **values)
        assert tokens[0] == [[best, 0, 0, 0, 0]]


def test_a_search_in_which_all_tokens_are_suppressed_is_refused():
    with pytest.raises(ValueError, match="4 tokens"):
        search(suppress_tokens=(END, START, A, B), at_max_length="cut")
