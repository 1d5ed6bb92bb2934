"""Options of a search: extra candidates, maximum lengths, early stopping, processors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import (
    Prompts,
    SamplingConfig,
    SearchConfig,
    beam_search,
    force_token_at,
    no_repeat_ngram,
    renormalize,
    sample,
)
from tests.decoding.test_decoding import NoMemory, close

END, START, A, B = range(4)


def table(start, a, b):
    """The logits of a Markov model on end, start, a and b; rows are probabilities after each."""
    with np.errstate(divide="ignore"):
        logits = np.log([[1.0, 0.0, 0.0, 0.0], start, a, b])
    return np.float32(logits + np.array([[0.0], [1.0], [-2.0], [0.5]]))


PLAIN = {"beam_size": 2, "max_new_tokens": 5, "length_penalty": 0.0, "eos": (END,)}


def search(logits, limits=(3, 3), logits_processors=(), bos=START, **settings):
    """The texts that a beam of 2 finds after `bos`, with their probabilities and scores."""
    config = SearchConfig(**PLAIN | settings)
    first, processors = np.full(len(limits), bos), tuple(logits_processors)
    found = _search(logits, first, np.array(limits), config, processors)
    found = jax.device_get(found)
    return found.tokens.tolist(), np.exp(found.log_probs.sum(axis=-1)), found.scores


@partial(jax.jit, static_argnames=("config", "processors"))
def _search(logits, first, limits, config, processors):
    return beam_search(
        lambda tokens, cache: (logits[tokens], cache),
        NoMemory(),
        first,
        limits,
        config,
        logits_processors=processors,
    )


def test_an_extra_candidate_takes_the_place_of_a_text_that_has_ended():
    #         0.5
    # start ------> end               the first step's two best are this one
    #    |    0.3        0.5
    #    +------> a ---------> end    and this one: without an extra candidate b is never seen
    #    |    0.2        0.9
    #    +------> b ---------> end
    logits = table([0.5, 0.0, 0.3, 0.2], [0.5, 0.0, 0.5, 0.0], [0.9, 0.0, 0.0, 0.1])
    tokens, probabilities, _ = search(logits, extra_candidates=0)
    assert tokens == [[[END, 0, 0, 0, 0], [A, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.5, 0.15]] * 2)
    tokens, probabilities, _ = search(logits, extra_candidates=1)
    assert tokens == [[[END, 0, 0, 0, 0], [B, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.5, 0.18]] * 2)


def test_an_extra_candidate_that_ends_is_not_among_the_finished():
    logits = table([0.2, 0.0, 0.45, 0.35], [0.4, 0.0, 0.6, 0.0], [0.4, 0.0, 0.0, 0.6])
    tokens, _, _ = search(logits, limits=(1, 2), extra_candidates=1, at_max_length="cut")
    assert tokens[0] == [[A, 0, 0, 0, 0], [B, 0, 0, 0, 0]]
    assert tokens[1] == [[A, A, 0, 0, 0], [B, B, 0, 0, 0]]


@pytest.mark.parametrize(
    ("at_max_length", "last", "costs"),
    [("force_eos", END, 0.1), ("force_eos_at_no_cost", END, 1.0), ("cut", A, 0.9)],
)
def test_a_text_of_the_maximum_length_ends_at_its_price_or_for_nothing_or_is_cut(
    at_max_length, last, costs
):
    logits = table([0.0, 0.0, 1.0, 0.0], [0.1, 0.0, 0.9, 0.0], [1.0, 0.0, 0.0, 0.0])
    tokens, probabilities, _ = search(
        logits, limits=(2, 4), beam_size=1, at_max_length=at_max_length
    )
    assert tokens == [[[A, last, 0, 0, 0]], [[A, A, A, last, 0]]]
    close(probabilities, [[costs], [0.81 * costs]])


@pytest.mark.parametrize(
    ("early_stopping", "text", "score"),
    [("heuristic", [END, 0, 0, 0, 0], -1.0498), ("never", [A, A, A, END, 0], -0.3537)],
)
def test_a_heuristic_search_stops_before_a_longer_and_better_text(early_stopping, text, score):
    """END and B end a text: log 0.35 / 1 against (log 0.3 + 2 log 0.9) / 4."""
    logits = table([0.35, 0.0, 0.3, 0.35], [0.1, 0.0, 0.9, 0.0], [1.0, 0.0, 0.0, 0.0])
    values = {"early_stopping": early_stopping, "at_max_length": "force_eos_at_no_cost"}
    values |= {"length_penalty_kind": "power", "length_penalty": 1.0, "extra_candidates": 2}
    values["eos"] = (END, B)
    tokens, _, scores = search(logits, limits=(4, 4), **values)
    assert [sentence[0] for sentence in tokens] == [text] * 2
    close(scores[:, 0], [score] * 2, atol=1e-4)


LOOP = table([0.1, 0.0, 0.6, 0.3], [0.2, 0.0, 0.5, 0.3], [0.3, 0.0, 0.4, 0.3])


def test_a_forced_token_costs_nothing_and_stands_where_it_is_told():
    tokens, probabilities, _ = search(LOOP, limits=(2, 2), forced_bos=B)
    assert tokens == [[[B, END, 0, 0, 0], [0] * 5]] * 2
    close(probabilities[:, 0], [0.3] * 2)
    tokens, probabilities, _ = search(LOOP, logits_processors=[force_token_at(B, index=1)])
    assert tokens == [[[A, B, END, 0, 0], [B, B, END, 0, 0]]] * 2
    close(probabilities, [[0.6 * 0.3, 0.3 * 0.3]] * 2)


def test_a_suppressed_token_leaves_the_others_their_probabilities():
    tokens, probabilities, _ = search(LOOP, limits=(2, 2), suppress_tokens=(A,))
    assert tokens == [[[END, 0, 0, 0, 0], [B, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.1, 0.09]] * 2)


def test_a_suppressed_token_leaves_the_others_its_probability_if_they_are_renormalized():
    values = {"limits": (2, 2), "suppress_tokens": (A,)}
    tokens, probabilities, _ = search(LOOP, logits_processors=[renormalize], **values)
    assert search(LOOP, renormalize_logits=True, **values)[0] == tokens
    assert tokens == [[[B, END, 0, 0, 0], [END, 0, 0, 0, 0]]] * 2
    close(probabilities, [[0.75 * 0.5, 0.25]] * 2)


def test_a_processor_knows_how_often_the_hypothesis_holds_each_token():
    def new(logits, history):
        return jnp.where((history.token_counts > 0) & (jnp.arange(4) > START), -jnp.inf, logits)

    tokens, probabilities, _ = search(LOOP, beam_size=3, logits_processors=[new])
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

    prompts = Prompts(np.array(first), np.array(limits), np.arange(2))
    found = jax.device_get(run(LOOP, prompts, jax.random.key(0)))
    return found.tokens[:, 0].tolist()


def test_a_forced_token_is_drawn_by_sampling_too():
    forced = [force_token_at(B), force_token_at(END, index=2)]
    assert greedy_texts([START, START], [3, 3], (END,), forced) == [[B, A, END]] * 2


def test_a_forced_token_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"tokens \[4\] are not in the vocabulary: give ids"):
        search(LOOP, forced_bos=4)


def test_a_text_lasts_as_long_as_it_must():
    values = {"beam_size": 1, "limits": (4, 4), "at_max_length": "cut"}
    tokens, _, _ = search(LOOP, suppress_tokens=(A, B), min_new_tokens=0, **values)
    assert tokens == [[[END, 0, 0, 0, 0]]] * 2
    ending = table([0.6, 0.0, 0.3, 0.1], [0.6, 0.0, 0.1, 0.3], [0.6, 0.0, 0.3, 0.1])
    tokens, _, _ = search(ending, min_new_tokens=2, **values)
    assert tokens == [[[A, B, END, 0, 0]]] * 2
    tokens, _, _ = search(ending, min_new_tokens=2, eos=(END, A), **values)
    assert tokens == [[[B, B, END, 0, 0]]] * 2


@pytest.mark.parametrize(
    ("size", "bos", "text"),
    [
        (1, START, [A, B, END, 0, 0, 0, 0]),
        (1, A, [B, END, 0, 0, 0, 0, 0]),
        (2, START, [A, A, B, A, END, 0, 0]),
        (2, A, [A, B, A, END, 0, 0, 0]),
        (3, START, [A, A, A, B, A, A, END]),
        (8, START, [A, A, A, A, A, A, END]),
    ],
)
def test_a_run_of_tokens_is_not_repeated(size, bos, text):
    values = {"beam_size": 1, "limits": (7, 7), "max_new_tokens": 7, "bos": bos}
    tokens, _, _ = search(LOOP, no_repeat_ngram_size=size, **values)
    assert tokens == [[text]] * 2


def test_hypotheses_repeat_no_run_of_their_own():
    values = {"beam_size": 4, "extra_candidates": 1, "no_repeat_ngram_size": 2}
    tokens, _, _ = search(LOOP, limits=(5, 4), **values)
    texts = [[x for x in text if x] for sentence in tokens for text in sentence]
    runs = [list(zip(text, text[1:], strict=False)) for text in texts]
    assert all(len(set(run)) == len(run) for run in runs)
    assert max(map(len, texts)) == 3


def test_a_run_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="size=0, but it must be at least 1"):
        no_repeat_ngram(0)


def test_any_of_several_ends_ends_a_text():
    tokens, probabilities, _ = search(LOOP, eos=(END, B))
    assert tokens == [[[B, 0, 0, 0, 0], [A, B, 0, 0, 0]]] * 2
    close(probabilities, [[0.3, 0.18]] * 2)
    with pytest.raises(ValueError, match=r"eos=\(0, 4\), but .* the tokens 0 to 3"):
        search(LOOP, eos=(END, 4))


def test_any_of_several_ends_ends_a_sampled_text():
    found = greedy_texts([START, A], [4, 3], (END, A), min_new_tokens=1)
    assert found == [[B, A, 0, 0], [B, A, 0, 0]]


def penalty(factor):
    """A processor that multiplies the log-probability of each token of the text."""
    return lambda logits, history: jnp.where(history.token_counts > 0, factor * logits, logits)


def test_greedy_search_penalizes_repetition_in_its_logits():
    """A logit of a token that was written, or given as START, is twice as far below zero."""
    values = {"beam_size": 1, "limits": (2, 2), "at_max_length": "cut"}
    tokens, probabilities, _ = search(LOOP, repetition_penalty=2.0, **values)
    assert tokens == [[[A, B, 0, 0, 0]]] * 2
    after = np.asarray(LOOP)[A] * np.array([1.0, 1.0, 2.0, 1.0])
    close(probabilities, np.full((2, 1), 0.6 * np.exp(after[B]) / np.exp(after).sum()))
    tokens, probabilities, _ = search(LOOP, logits_processors=[penalty(2.0)], **values)
    assert tokens == [[[A, B, 0, 0, 0]]] * 2
    close(probabilities, np.full((2, 1), 0.6 * 0.3))


def test_the_token_before_a_text_counts_as_repeated():
    for bos, best in ((START, A), (A, B)):
        values = {"beam_size": 1, "limits": (1, 1), "at_max_length": "cut", "bos": bos}
        tokens, _, _ = search(LOOP, logits_processors=[penalty(3.0)], **values)
        assert tokens[0] == [[best, 0, 0, 0, 0]]


def test_a_search_in_which_all_tokens_are_suppressed_is_refused():
    with pytest.raises(ValueError, match="all 4 tokens are suppressed: leave at least one"):
        search(LOOP, suppress_tokens=(END, START, A, B), at_max_length="cut")


def test_several_hypotheses_penalize_repetition_in_their_log_probabilities():
    values = {"limits": (2, 2), "at_max_length": "cut"}
    tokens, _, scores = search(LOOP, repetition_penalty=2.0, **values)
    assert tokens[0] == [[A, B, 0, 0, 0], [A, A, 0, 0, 0]]
    close(np.exp(scores[0]), [0.6 * 0.3, 0.6 * 0.5**2])
