"""What a search can be given besides a model: spare candidates, limits, outlooks, rules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxformer.decoding import (
    as_it_stands,
    at_best,
    at_the_limit,
    banned,
    beam_search,
    ends_for_nothing,
    forced,
    greedy,
    is_cut,
    lasting,
    must_end,
    no_repeats,
    power,
    renormalized,
    repetition_penalty,
    sample,
)

END, START, A, B = range(4)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@struct.dataclass
class NoMemory:
    """The cache of a Markov model."""

    def select(self, parents):
        return self


def table(start, a, b):
    """The logits of a Markov model on end, start, a and b; rows are probabilities after each."""
    with np.errstate(divide="ignore"):
        logits = np.log([[1.0, 0.0, 0.0, 0.0], start, a, b])
    return jnp.asarray(logits + np.array([[0.0], [1.0], [-2.0], [0.5]]), jnp.float32)


def search(logits, limits=(3, 3), **values):
    """The texts that a beam of 2 finds after `start`, with their probabilities and scores."""
    settings = {"width": 2, "length": 5, "end": END, "penalty": power(0.0)} | values
    limits = jnp.array(limits)
    found = beam_search(
        lambda tokens, cache: (logits[tokens], cache),
        NoMemory(),
        jnp.full(limits.shape, START),
        limits,
        **settings,
    )
    return found.tokens.tolist(), np.exp(found.log_probs.sum(axis=-1)), found.scores


def test_a_spare_candidate_takes_the_place_of_a_text_that_has_ended():
    #         0.5
    # start ------> end               the first step's two best are this one
    #    |    0.3        0.5
    #    +------> a ---------> end    and this one: without a spare b is never seen
    #    |    0.2        0.9
    #    +------> b ---------> end
    logits = table([0.5, 0.0, 0.3, 0.2], [0.5, 0.0, 0.5, 0.0], [0.9, 0.0, 0.0, 0.1])
    tokens, probabilities, _ = search(logits, spare=0)
    assert tokens == [[[END, 0, 0, 0, 0], [A, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.5, 0.15]] * 2)
    tokens, probabilities, _ = search(logits, spare=2)
    assert tokens == [[[END, 0, 0, 0, 0], [B, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.5, 0.18]] * 2)


def test_a_spare_candidate_that_ends_is_not_among_the_finished():
    logits = table([0.2, 0.0, 0.45, 0.35], [0.4, 0.0, 0.6, 0.0], [0.4, 0.0, 0.0, 0.6])
    tokens, _, _ = search(logits, limits=(1, 2), spare=2, limit=is_cut)
    assert tokens[0] == [[A, 0, 0, 0, 0], [B, 0, 0, 0, 0]]
    assert tokens[1] == [[A, A, 0, 0, 0], [B, B, 0, 0, 0]]


@pytest.mark.parametrize(
    ("limit", "last", "costs"),
    [(must_end, END, 0.1), (ends_for_nothing, END, 1.0), (is_cut, A, 0.9)],
)
def test_a_text_at_its_limit_ends_at_its_price_or_for_nothing_or_is_cut(limit, last, costs):
    logits = table([0.0, 0.0, 1.0, 0.0], [0.1, 0.0, 0.9, 0.0], [1.0, 0.0, 0.0, 0.0])
    tokens, probabilities, _ = search(logits, limits=(2, 4), width=1, limit=limit)
    assert tokens == [[[A, last, 0, 0, 0]], [[A, A, A, last, 0]]]
    close(probabilities, [[costs], [0.81 * costs]])


def test_an_outlook_is_the_score_of_ending_now_next_or_at_the_limit():
    best, limits = jnp.array([-2.0, -4.0]), jnp.array([8.0, 16.0])
    for exponent in (1.0, -1.0):
        penalty = power(exponent)
        close(as_it_stands(penalty, best, 2.0, limits), best / 2.0**exponent)
        close(at_the_limit(penalty, best, 2.0, limits), best / limits**exponent)
        longest = 3.0 if exponent < 0 else limits
        close(at_best(penalty, best, 2.0, limits), best / longest**exponent)


@pytest.mark.parametrize(
    ("outlook", "text"), [(as_it_stands, [END, 0, 0, 0, 0]), (at_best, [A, A, A, END, 0])]
)
def test_a_search_that_sees_no_further_than_the_text_stops_before_a_longer_and_better(
    outlook, text
):
    """log 0.6 / 1 = -0.51 against (log 0.4 + 2 log 0.9) / 4 = -0.28."""
    logits = table([0.6, 0.0, 0.4, 0.0], [0.1, 0.0, 0.9, 0.0], [1.0, 0.0, 0.0, 0.0])
    values = {"outlook": outlook, "limit": ends_for_nothing, "penalty": power(1.0)}
    tokens, _, scores = search(logits, limits=(4, 4), width=1, spare=1, **values)
    assert tokens == [[text]] * 2
    close(scores, np.full((2, 1), -0.5108 if text[0] == END else -0.2818), atol=1e-4)


LOOP = table([0.1, 0.0, 0.6, 0.3], [0.2, 0.0, 0.5, 0.3], [0.3, 0.0, 0.4, 0.3])


def test_a_forced_token_costs_nothing_and_stands_where_it_is_told():
    tokens, probabilities, _ = search(LOOP, limits=(2, 2), rules=[forced(B)])
    assert tokens == [[[B, END, 0, 0, 0], [0] * 5]] * 2
    close(probabilities[:, 0], [0.3] * 2)
    tokens, probabilities, _ = search(LOOP, rules=[forced(B, after=1)])
    assert tokens == [[[A, B, END, 0, 0], [B, B, END, 0, 0]]] * 2
    close(probabilities, [[0.6 * 0.3, 0.3 * 0.3]] * 2)


def test_a_banned_token_leaves_the_others_their_probabilities():
    tokens, probabilities, _ = search(LOOP, limits=(2, 2), rules=[banned([A])])
    assert tokens == [[[END, 0, 0, 0, 0], [B, END, 0, 0, 0]]] * 2
    close(probabilities, [[0.1, 0.09]] * 2)


def test_a_banned_token_leaves_the_others_its_probability_if_they_are_renormalized():
    tokens, probabilities, _ = search(LOOP, limits=(2, 2), rules=[banned([A]), renormalized])
    assert tokens == [[[B, END, 0, 0, 0], [END, 0, 0, 0, 0]]] * 2
    close(probabilities, [[0.75 * 0.5, 0.25]] * 2)


def test_a_rule_knows_how_often_the_hypothesis_holds_each_token():
    def new(logits, text):
        return jnp.where((text.counts > 0) & (jnp.arange(4) > START), -jnp.inf, logits)

    tokens, probabilities, _ = search(LOOP, width=3, rules=[new])
    texts = [[END, 0, 0, 0, 0], [A, B, END, 0, 0], [A, END, 0, 0, 0]]
    assert sorted(tokens[0]) == sorted(texts)
    close(np.sort(probabilities[0]), np.sort([0.1, 0.6 * 0.3 * 0.3, 0.6 * 0.2]))


def test_a_forced_token_is_drawn_by_sampling_too():
    found = sample(
        lambda tokens, cache: (LOOP[tokens], cache),
        NoMemory(),
        jnp.full(2, START),
        jnp.full(2, 3),
        jax.random.key(0),
        jnp.arange(2),
        pick=greedy,
        length=3,
        end=END,
        rules=[forced(B), forced(END, after=2)],
    )
    assert found.tokens[:, 0].tolist() == [[B, A, END]] * 2


def test_fewer_than_no_spare_candidates_are_refused():
    with pytest.raises(ValueError, match="spare=-1, but it counts further candidates: give 0"):
        search(LOOP, spare=-1)


def test_a_forced_token_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="token 4 was forced, but there are only 0 to 3"):
        search(LOOP, rules=[forced(4)])


def test_a_text_lasts_as_long_as_it_must():
    values = {"width": 1, "limits": (4, 4), "limit": is_cut}
    tokens, _, _ = search(LOOP, rules=[banned([A, B]), lasting(0, [END])], **values)
    assert tokens == [[[END, 0, 0, 0, 0]]] * 2
    ending = table([0.6, 0.0, 0.3, 0.1], [0.6, 0.0, 0.1, 0.3], [0.6, 0.0, 0.3, 0.1])
    tokens, _, _ = search(ending, rules=[lasting(2, [END])], **values)
    assert tokens == [[[A, B, END, 0, 0]]] * 2
    tokens, _, _ = search(ending, rules=[lasting(2, [END, A])], **values)
    assert tokens == [[[B, B, END, 0, 0]]] * 2


@pytest.mark.parametrize(
    ("size", "before", "text"),
    [
        (1, [], [A, B, END, 0, 0, 0, 0]),
        (1, [A], [B, END, 0, 0, 0, 0, 0]),
        (2, [], [A, A, B, A, END, 0, 0]),
        (2, [A], [A, B, A, END, 0, 0, 0]),
        (3, [], [A, A, A, B, A, A, END]),
        (8, [], [A, A, A, A, A, A, END]),
    ],
)
def test_a_run_of_tokens_is_not_repeated(size, before, text):
    values = {"width": 1, "limits": (7, 7), "length": 7}
    tokens, _, _ = search(LOOP, rules=[no_repeats(size, before)], **values)
    assert tokens == [[text]] * 2


def test_hypotheses_repeat_no_run_of_their_own():
    tokens, _, _ = search(LOOP, limits=(5, 4), width=4, spare=4, rules=[no_repeats(2, [START])])
    texts = [[x for x in text if x] for sentence in tokens for text in sentence]
    runs = [list(zip(text, text[1:], strict=False)) for text in texts]
    assert all(len(set(run)) == len(run) for run in runs)
    assert max(map(len, texts)) == 3


def test_a_run_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="no_repeats was given size=0, but a run has at least 1"):
        no_repeats(0)


def test_any_of_several_ends_ends_a_text():
    tokens, probabilities, _ = search(LOOP, end=(END, B))
    assert tokens == [[[B, 0, 0, 0, 0], [A, B, 0, 0, 0]]] * 2
    close(probabilities, [[0.3, 0.18]] * 2)
    with pytest.raises(ValueError, match=r"end=\(0, 4\) is not among the 4 tokens"):
        search(LOOP, end=(END, 4))


def test_any_of_several_ends_ends_a_sampled_text():
    found = sample(
        lambda tokens, cache: (LOOP[tokens], cache),
        NoMemory(),
        jnp.array([START, A]),
        jnp.array([4, 3]),
        jax.random.key(0),
        jnp.arange(2),
        pick=greedy,
        length=4,
        end=(END, A),
        rules=[lasting(1, [A])],
    )
    assert found.tokens[:, 0].tolist() == [[B, A, 0, 0], [B, A, 0, 0]]


def test_a_rule_on_logits_leaves_probabilities_that_add_up_to_one():
    """What stands there is twice as far below zero; START, which was given, too."""
    rule = repetition_penalty(2.0, [START])
    values = {"width": 1, "limits": (2, 2), "limit": is_cut}
    tokens, probabilities, _ = search(LOOP, logit_rules=[rule], **values)
    assert tokens == [[[A, B, 0, 0, 0]]] * 2
    after = np.asarray(LOOP)[A] * np.array([1.0, 1.0, 2.0, 1.0])
    close(probabilities, np.full((2, 1), 0.6 * np.exp(after[B]) / np.exp(after).sum()))
    tokens, probabilities, _ = search(LOOP, rules=[rule], **values)
    assert tokens == [[[A, B, 0, 0, 0]]] * 2
    close(probabilities, np.full((2, 1), 0.6 * 0.3))


def test_what_was_before_a_text_counts_as_repeated():
    values = {"width": 1, "limits": (1, 1), "limit": is_cut}
    assert search(LOOP, rules=[repetition_penalty(3.0)], **values)[0][0] == [[A, 0, 0, 0, 0]]
    assert search(LOOP, rules=[repetition_penalty(3.0, [A])], **values)[0][0] == [[B, 0, 0, 0, 0]]
