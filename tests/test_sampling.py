"""Sampling from a Markov model: rules, truncation, an end that may be missing, and a watch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxformer.decoding import (
    Written,
    banned,
    greedy,
    min_p,
    repetition_penalty,
    sample,
    temperature,
    top_k,
    truncated,
)

VOCAB = 7
PROBABILITIES = np.array([0.02, 0.30, 0.08, 0.30, 0.15, 0.05, 0.10])


def table(seed=3):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@partial(jax.jit, static_argnames=("pick", "length", "end", "rules", "watch"))
def run(logits, first, limits, *, pick=greedy, length=11, end=None, rows=None, **rest):
    rows = jnp.arange(len(first)) if rows is None else rows

    def step(tokens, cache):
        return logits[tokens], cache

    inputs = step, None, first, limits, jax.random.key(5), rows
    return sample(*inputs, pick=pick, length=length, end=end, **rest)


def each(pick, logits, seed=7):
    """One token for each row of `logits` [B, V]."""
    rngs = jax.random.split(jax.random.key(seed), len(logits))
    return np.asarray(jax.vmap(pick)(jnp.asarray(logits, jnp.float32), rngs))


def drawn(pick, probabilities, count=4_000):
    logits = np.tile(np.log(probabilities), (count, 1))
    return np.bincount(each(pick, logits), minlength=len(probabilities))


def chi_square(counts, probabilities):
    kept = counts > 0
    expected = counts.sum() * probabilities[kept] / probabilities[kept].sum()
    return ((counts[kept] - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    "pick, kept",
    [
        (min_p(0.0), [0, 1, 2, 3, 4, 5, 6]),
        (min_p(0.3), [1, 3, 4, 6]),
        (min_p(0.49), [1, 3, 4]),
        (min_p(1.0), [1, 3]),
        # At temperature 1/2 a third of the probability is a ninth of its square.
        (min_p(0.3, 0.5), [1, 3]),
        (truncated(1.0, k=5), [1, 2, 3, 4, 6]),
        (truncated(1.0, k=5, min_p=0.3), [1, 3, 4, 6]),
        # Of 0.85 that the four likeliest have together, the first two have 0.71.
        (truncated(1.0, k=4, p=0.70), [1, 3]),
        (truncated(1.0, p=0.70), [1, 3, 4]),
        (truncated(1.0, k=4, p=0.999, min_p=0.4), [1, 3, 4]),
        (truncated(1.0, p=1e-9), [1]),
    ],
)
def test_a_token_is_drawn_from_those_that_every_truncation_keeps(pick, kept):
    counts = drawn(pick, PROBABILITIES)
    assert np.flatnonzero(counts).tolist() == kept


@pytest.mark.parametrize(
    "pick, power",
    [
        (min_p(0.3), 1.0),
        (truncated(1.7, k=5, p=0.95, min_p=0.1), 1 / 1.7),
        (min_p(0.05, 0.7), 1 / 0.7),
    ],
)
def test_what_is_kept_is_drawn_with_the_models_probabilities(pick, power):
    # Of at most 6 degrees of freedom: more than 27.9 is seen once in 10,000 seeds.
    assert chi_square(drawn(pick, PROBABILITIES), PROBABILITIES**power) < 27.9


def test_of_equally_likely_tokens_the_first_are_kept_as_greedy_takes_the_first():
    even = np.full(VOCAB, 1 / VOCAB)
    assert np.flatnonzero(drawn(truncated(1.0, k=3), even)).tolist() == [0, 1, 2]
    assert np.flatnonzero(drawn(truncated(1.0, p=0.30), even)).tolist() == [0, 1, 2]
    assert each(greedy, np.zeros((2, VOCAB))).tolist() == [0, 0]
    assert each(top_k(1, 9.0), np.zeros((2, VOCAB))).tolist() == [0, 0]


@pytest.mark.parametrize(
    "pick", [min_p(1.0), temperature(1e-36), truncated(1e-36, k=5, p=0.9, min_p=0.1)]
)
def test_the_narrowest_truncations_are_greedy_at_any_scale(pick):
    logits = 1e4 * np.random.default_rng(2).normal(size=(29, VOCAB))
    assert np.array_equal(each(pick, logits), np.argmax(logits, axis=-1))


def test_a_penalty_lowers_what_the_text_holds_and_how_often_does_not_matter():
    logits, counts = jnp.array([2.0, 2.0, -3.0, -3.0, 0.0]), jnp.array([1, 0, 5, 0, 2])
    text = Written(counts, jnp.zeros(3, int), 0)
    found = repetition_penalty(2.0)(logits, text)
    assert found.tolist() == [1.0, 2.0, -6.0, -3.0, 0.0]
    assert repetition_penalty(0.5)(logits, text).tolist() == [4.0, 2.0, -1.5, -3.0, 0.0]
    assert repetition_penalty(1.0)(logits, text).tolist() == logits.tolist()


def by_hand(logits, first, limit, seen, penalty):
    """Greedy sampling with a penalty on all tokens seen, in numpy."""
    counts, tokens, log_probs = seen.copy(), [], []
    for _ in range(limit):
        row = logits[[first, *tokens][-1]].astype(np.float64)
        lowered = np.where(row > 0, row / penalty, row * penalty)
        tokens.append(int(np.argmax(np.where(counts > 0, lowered, row))))
        log_probs.append(row[tokens[-1]] - np.log(np.exp(row).sum()))
        counts[tokens[-1]] += 1
    return tokens, log_probs


def test_the_rules_see_the_prompt_and_what_is_made_and_scores_are_the_models_own(assert_equal):
    logits, first, limits = table(), np.array([0, 3, 5]), np.array([11, 2, 7])
    seen = np.random.default_rng(1).integers(0, 2, (3, VOCAB)).astype(np.int32)
    rules = (repetition_penalty(3.0),)
    found = run(logits, first, limits, rules=rules, seen=seen)
    bare = run(logits, first, limits)
    fresh = run(logits, first, limits, rules=rules)
    assert not np.array_equal(found.tokens, bare.tokens)
    assert not np.array_equal(found.tokens, fresh.tokens)
    for b in range(3):
        for result, counts in ((found, seen[b]), (fresh, np.zeros(VOCAB, int))):
            tokens, log_probs = by_hand(logits, first[b], limits[b], counts, 3.0)
            padding = [0] * (11 - limits[b])
            assert result.tokens[b, 0].tolist() == tokens + padding
            assert_equal(result.log_probs[b, 0], log_probs + padding)
            assert_equal(result.scores[b, 0], sum(log_probs))


def test_what_is_banned_is_never_made():
    first, limits = np.zeros(31, np.int32), np.full(31, 11)
    rules = (banned([1, 4, 5]), repetition_penalty(1.2))
    found = run(table(), first, limits, pick=temperature(9.0), rules=rules)
    assert set(np.unique(found.tokens)) == {0, 2, 3, 6}
    assert banned([])(jnp.ones(3), None).tolist() == [1.0, 1.0, 1.0]


def test_a_text_without_an_end_goes_on_to_its_limit():
    limits = np.array([11, 3, 0])
    found = run(table(), np.array([1, 2, 3]), limits, end=None)
    written = np.asarray(found.log_probs[:, 0]) < 0
    assert written.sum(axis=1).tolist() == limits.tolist()
    ends = run(table(), np.array([1, 2, 3]), limits, end=int(found.tokens[0, 0, 0]))
    assert (np.asarray(ends.log_probs[:, 0]) < 0).sum(axis=1)[0] == 1


def test_a_text_made_in_two_parts_is_the_text_made_in_one():
    first, rows, pick = np.array([0, 3, 5, 1]), np.array([4, 9, 2, 7]), temperature(1.5)
    whole = run(table(), first, np.full(4, 11), pick=pick, rows=rows).tokens[:, 0]
    start = run(table(), first, np.full(4, 5), pick=pick, rows=rows).tokens[:, 0, :5]
    rest = run(table(), start[:, -1], np.full(4, 6), pick=pick, rows=rows, made=5).tokens[:, 0, :6]
    assert np.array_equal(np.concatenate([start, rest], axis=1), whole)
    again = run(table(), start[:, -1], np.full(4, 6), pick=pick, rows=rows).tokens[:, 0, :6]
    assert not np.array_equal(again, rest)


HEARD = []


def hear(index, tokens):
    """Stops sentence 1 at its third token."""
    HEARD.append((int(index), np.asarray(tokens).tolist()))
    return np.arange(len(tokens)) == (1 if index == 2 else -1)


def watch(index, tokens):
    return io_callback(hear, jax.ShapeDtypeStruct(tokens.shape, bool), index, tokens)


def test_a_watch_hears_every_token_in_order_and_stops_what_it_wants():
    HEARD.clear()
    first, limits = np.array([0, 3, 5]), np.array([4, 11, 7])
    free = np.asarray(run(table(), first, limits).tokens[:, 0])
    found = jax.device_get(run(table(), first, limits, watch=watch)).tokens[:, 0]
    assert [index for index, _ in HEARD] == list(range(7)), "the longest that is left ends at 7"
    assert np.array_equal(np.array([tokens for _, tokens in HEARD]).T, found[:, :7])
    for b, size in enumerate([4, 3, 7]):
        assert np.array_equal(found[b, :size], free[b, :size]) and not found[b, size:].any()


def test_sampling_refuses_an_end_or_counts_of_another_vocabulary():
    first, limits = np.array([0, 3]), np.array([4, 4])
    with pytest.raises(ValueError, match="end=7 is not among the 7 tokens"):
        run(table(), first, limits, end=7)
    with pytest.raises(ValueError, match=r"seen has shape \(2, 5\), but must be \[B, V\] \(2, 7\)"):
        run(table(), first, limits, rules=(banned([1]),), seen=np.zeros((2, 5), np.int32))
    with pytest.raises(ValueError, match="tokens 2 to 7 were banned, but there are only 0 to 6"):
        run(table(), first, limits, rules=(banned([2, 7]),))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: min_p(1.5), "min_p was given 1.5, but needs a share of 0 to 1"),
        (lambda: min_p(-0.1), "min_p was given -0.1"),
        (lambda: min_p(0.5, 0.0), "temperature 0.0 was given, but it must be positive"),
        (lambda: truncated(1.0, k=0), "k=0, but needs at least 1"),
        (lambda: truncated(1.0, p=float("nan")), "p=nan, but needs 0 < p <= 1"),
        (lambda: repetition_penalty(0.0), "repetition_penalty 0.0 was given"),
    ],
)
def test_a_rule_refuses_what_it_cannot_mean(make, message):
    with pytest.raises(ValueError, match=message):
        make()
