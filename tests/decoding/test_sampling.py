"""Sampling from a Markov model: processors, truncation, an EOS that may be missing, stopping."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxformer.decoding import (
    DecodeHistory,
    Prompts,
    SamplingConfig,
    greedy,
    min_p,
    repetition_penalty,
    sample,
    suppress_tokens,
    temperature,
    top_k,
    top_k_top_p,
)

VOCAB = 7
PROBABILITIES = np.array([0.02, 0.30, 0.08, 0.30, 0.15, 0.05, 0.10])


def table(seed=3):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def run(logits, first, limits, *, eos=None, example_ids=None, **rest):
    example_ids = jnp.arange(len(first)) if example_ids is None else example_ids
    given = {name: rest.pop(name) for name in ("step_offset", "token_counts") if name in rest}
    prompts = Prompts(first, limits, example_ids, **given)
    rest = {"sampler": greedy, "logits_processors": ()} | rest
    return _run(logits, prompts, SamplingConfig(max_new_tokens=11, eos=eos), **rest)


@partial(jax.jit, static_argnames=("config", "sampler", "logits_processors", "stop_fn"))
def _run(logits, prompts, config, **rest):
    def step(tokens, cache):
        return logits[tokens], cache

    return sample(step, None, prompts, jax.random.key(5), config, **rest)


def each(sampler, logits, seed=7):
    """One token for each row of `logits` [B, V]."""
    rngs = jax.random.split(jax.random.key(seed), len(logits))
    return np.asarray(jax.vmap(sampler)(jnp.asarray(logits, jnp.float32), rngs))


def drawn(sampler, probabilities, count=4_000):
    logits = np.tile(np.log(probabilities), (count, 1))
    return np.bincount(each(sampler, logits), minlength=len(probabilities))


def chi_square(counts, probabilities):
    kept = counts > 0
    expected = counts.sum() * probabilities[kept] / probabilities[kept].sum()
    return ((counts[kept] - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    "sampler, kept",
    [
        (min_p(0.0), [0, 1, 2, 3, 4, 5, 6]),
        (min_p(0.3), [1, 3, 4, 6]),
        (min_p(0.49), [1, 3, 4]),
        (min_p(1.0), [1, 3]),
        # At temperature 1/2 a third of the probability is a ninth of its square.
        (min_p(0.3, 0.5), [1, 3]),
        (top_k_top_p(1.0, k=5), [1, 2, 3, 4, 6]),
        (top_k_top_p(1.0, k=5, min_p=0.3), [1, 3, 4, 6]),
        # Of 0.85 that the four likeliest have together, the first two have 0.71.
        (top_k_top_p(1.0, k=4, p=0.70), [1, 3]),
        (top_k_top_p(1.0, p=0.70), [1, 3, 4]),
        (top_k_top_p(1.0, k=4, p=0.999, min_p=0.4), [1, 3, 4]),
        (top_k_top_p(1.0, p=1e-9), [1]),
    ],
)
def test_a_token_is_drawn_from_those_that_every_truncation_keeps(sampler, kept):
    counts = drawn(sampler, PROBABILITIES)
    assert np.flatnonzero(counts).tolist() == kept


@pytest.mark.parametrize(
    "sampler, power",
    [
        (min_p(0.3), 1.0),
        (top_k_top_p(1.7, k=5, p=0.95, min_p=0.1), 1 / 1.7),
        (min_p(0.05, 0.7), 1 / 0.7),
    ],
)
def test_what_is_kept_is_drawn_with_the_models_probabilities(sampler, power):
    # Of at most 6 degrees of freedom: more than 27.9 is seen once in 10,000 seeds.
    assert chi_square(drawn(sampler, PROBABILITIES), PROBABILITIES**power) < 27.9


def test_of_equally_likely_tokens_the_first_are_kept_as_greedy_takes_the_first():
    even = np.full(VOCAB, 1 / VOCAB)
    assert np.flatnonzero(drawn(top_k_top_p(1.0, k=3), even)).tolist() == [0, 1, 2]
    assert np.flatnonzero(drawn(top_k_top_p(1.0, p=0.30), even)).tolist() == [0, 1, 2]
    assert each(greedy, np.zeros((2, VOCAB))).tolist() == [0, 0]
    assert each(top_k(1, 9.0), np.zeros((2, VOCAB))).tolist() == [0, 0]


@pytest.mark.parametrize(
    "sampler", [min_p(1.0), temperature(1e-36), top_k_top_p(1e-36, k=5, p=0.9, min_p=0.1)]
)
def test_the_narrowest_truncations_are_greedy_at_any_scale(sampler):
    logits = 1e4 * np.random.default_rng(2).normal(size=(29, VOCAB))
    assert np.array_equal(each(sampler, logits), np.argmax(logits, axis=-1))


def test_a_penalty_lowers_what_the_text_holds_and_how_often_does_not_matter():
    logits, counts = jnp.array([2.0, 2.0, -3.0, -3.0, 0.0]), jnp.array([1, 0, 5, 0, 2])
    history = DecodeHistory(counts, jnp.zeros(3, int), 0)
    found = repetition_penalty(2.0)(logits, history)
    assert found.tolist() == [1.0, 2.0, -6.0, -3.0, 0.0]
    assert repetition_penalty(0.5)(logits, history).tolist() == [4.0, 2.0, -1.5, -3.0, 0.0]
    assert repetition_penalty(1.0)(logits, history).tolist() == logits.tolist()


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


def test_the_processors_see_the_prompt_and_what_is_made_and_scores_are_the_models_own(assert_equal):
    logits, first, limits = table(), np.array([0, 3, 5]), np.array([11, 2, 7])
    seen = np.random.default_rng(1).integers(0, 2, (3, VOCAB)).astype(np.int32)
    given = {"logits_processors": (repetition_penalty(3.0),)}
    found = run(logits, first, limits, token_counts=seen, **given)
    bare = run(logits, first, limits)
    fresh = run(logits, first, limits, **given)
    assert not np.array_equal(found.tokens, bare.tokens)
    assert not np.array_equal(found.tokens, fresh.tokens)
    for b in range(3):
        for result, counts in ((found, seen[b]), (fresh, np.zeros(VOCAB, int))):
            tokens, log_probs = by_hand(logits, first[b], limits[b], counts, 3.0)
            padding = [0] * (11 - limits[b])
            assert result.tokens[b, 0].tolist() == tokens + padding
            assert_equal(result.log_probs[b, 0], log_probs + padding)
            assert_equal(result.scores[b, 0], sum(log_probs))


def test_what_is_suppressed_is_never_written():
    first, limits = np.zeros(31, np.int32), np.full(31, 11)
    rules = (suppress_tokens([1, 4, 5]), repetition_penalty(1.2))
    found = run(table(), first, limits, sampler=temperature(9.0), logits_processors=rules)
    assert set(np.unique(found.tokens)) == {0, 2, 3, 6}
    assert suppress_tokens([])(jnp.ones(3), None).tolist() == [1.0, 1.0, 1.0]


def test_a_text_without_an_end_goes_on_to_its_limit():
    limits = np.array([11, 3, 0])
    found = run(table(), np.array([1, 2, 3]), limits)
    written = np.asarray(found.log_probs[:, 0]) < 0
    assert written.sum(axis=1).tolist() == limits.tolist()
    ends = run(table(), np.array([1, 2, 3]), limits, eos=(int(found.tokens[0, 0, 0]),))
    assert (np.asarray(ends.log_probs[:, 0]) < 0).sum(axis=1)[0] == 1


def test_a_text_written_in_two_parts_is_the_text_written_in_one():
    draw = partial(run, table(), sampler=temperature(1.5), example_ids=np.array([4, 9, 2, 7]))
    first = np.array([0, 3, 5, 1])
    whole = draw(first, np.full(4, 11)).tokens[:, 0]
    start = draw(first, np.full(4, 5)).tokens[:, 0, :5]
    rest = draw(start[:, -1], np.full(4, 6), step_offset=5).tokens[:, 0, :6]
    assert np.array_equal(np.concatenate([start, rest], axis=1), whole)
    again = draw(start[:, -1], np.full(4, 6)).tokens[:, 0, :6]
    assert not np.array_equal(again, rest)


HEARD = []


def hear(index, tokens):
    """Stops sentence 1 at its third token."""
    HEARD.append((int(index), np.asarray(tokens).tolist()))
    return np.arange(len(tokens)) == (1 if index == 2 else -1)


def stop_fn(index, tokens):
    return io_callback(hear, jax.ShapeDtypeStruct(tokens.shape, bool), index, tokens)


def test_a_stop_function_gets_every_token_in_order_and_stops_what_it_wants():
    HEARD.clear()
    first, limits = np.array([0, 3, 5]), np.array([4, 11, 7])
    free = np.asarray(run(table(), first, limits).tokens[:, 0])
    found = jax.device_get(run(table(), first, limits, stop_fn=stop_fn)).tokens[:, 0]
    assert [index for index, _ in HEARD] == list(range(7)), "the longest that is left ends at 7"
    assert np.array_equal(np.array([tokens for _, tokens in HEARD]).T, found[:, :7])
    for b, size in enumerate([4, 3, 7]):
        assert np.array_equal(found[b, :size], free[b, :size]) and not found[b, size:].any()


def test_sampling_refuses_an_eos_or_counts_of_another_vocabulary():
    first, limits = np.array([0, 3]), np.array([4, 4])
    with pytest.raises(ValueError, match=r"eos=\(7,\), but .* the tokens 0 to 6"):
        run(table(), first, limits, eos=(7,))
    with pytest.raises(
        ValueError, match=r"token_counts has shape \(2, 5\), but must be \[B, V\] \(2, 7\)"
    ):
        given = {"logits_processors": (suppress_tokens([1]),)}
        run(table(), first, limits, token_counts=np.zeros((2, 5), np.int32), **given)
    with pytest.raises(
        ValueError, match=r"tokens \[7\] were suppressed, but there are only 0 to 6"
    ):
        run(table(), first, limits, logits_processors=(suppress_tokens([2, 7]),))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: min_p(1.5), "min_p was given 1.5, but needs 0 to 1"),
        (lambda: min_p(-0.1), "min_p was given -0.1"),
        (lambda: min_p(0.5, 0.0), "temperature 0.0 was given, but it must be positive"),
        (lambda: top_k_top_p(1.0, k=0), "k=0, but needs at least 1"),
        (lambda: top_k_top_p(1.0, p=float("nan")), "p=nan, but needs 0 < p <= 1"),
        (lambda: repetition_penalty(0.0), "repetition_penalty 0.0 was given"),
    ],
)
def test_a_sampler_or_processor_refuses_what_it_cannot_mean(make, message):
    with pytest.raises(ValueError, match=message):
        make()
