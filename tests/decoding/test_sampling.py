"""Sampling from a Markov model: processors, truncation, an EOS that may be missing, stopping."""

from functools import partial
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import (
    SamplerInputs,
    SamplingConfig,
    begin_sampling,
    no_repeat_ngram,
    sample,
    suppress_tokens,
)
from jaxformer.errors import ConfigError
from jaxformer.ops.dropout import DropoutRng

VOCAB = 7
PROBABILITIES = np.array([0.02, 0.30, 0.08, 0.30, 0.15, 0.05, 0.10])


def table(seed=3):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def drawing(temperature=1.0, **limits):
    return SamplingConfig(temperature=temperature, max_new_tokens=1, **limits)


def run(logits, first, limits, *, example_ids=None, settings=None, **options):
    example_ids = np.arange(len(first)) if example_ids is None else example_ids
    names = ("written", "history", "history_lengths")
    before = {name: options.pop(name) for name in names if name in options}
    prompts = SamplerInputs(first, limits, example_ids, **before)
    options = {"logits_processors": ()} | options
    config = SamplingConfig(max_new_tokens=11, **{"temperature": 0.0} | (settings or {}))
    return jax.device_get(_run(logits, prompts, config, **options))


@partial(jax.jit, static_argnames=("config", "logits_processors", "eos"))
def _run(logits, prompts, config, **rest):
    def step(tokens, cache):
        return logits[tokens], cache

    return sample(step, None, prompts, jax.random.key(5), config, **rest)


@partial(jax.jit, static_argnames="config")
def each(config, logits):
    """One token for each row of `logits` [B, V]."""
    prompts = SamplerInputs(*jnp.ones((2, len(logits)), int), jnp.arange(len(logits)))
    found = sample(
        lambda _, cache: (logits[:, None], cache), None, prompts, jax.random.key(7), config
    )
    return found.tokens[:, 0, 0]


def drawn(config, probabilities, count=4_000):
    logits = np.tile(np.float32(np.log(probabilities)), (count, 1))
    return np.bincount(each(config, logits), minlength=len(probabilities))


def chi_square(counts, probabilities):
    kept = counts > 0
    expected = counts.sum() * probabilities[kept] / probabilities[kept].sum()
    return ((counts[kept] - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    "config, kept",
    [
        (drawing(min_p=0.0), [0, 1, 2, 3, 4, 5, 6]),
        (drawing(min_p=0.3), [1, 3, 4, 6]),
        (drawing(min_p=0.49), [1, 3, 4]),
        (drawing(min_p=1.0), [1, 3]),
        # At temperature 1/2 a third of the probability is a ninth of its square.
        (drawing(0.5, min_p=0.3), [1, 3]),
        (drawing(1.0, top_k=5), [1, 2, 3, 4, 6]),
        (drawing(1.0, top_k=5, min_p=0.3), [1, 3, 4, 6]),
        # Of 0.85 that the four likeliest have together, the first two have 0.71.
        (drawing(1.0, top_k=4, top_p=0.70), [1, 3]),
        (drawing(1.0, top_p=0.70), [1, 3, 4]),
        (drawing(1.0, top_k=4, top_p=0.999, min_p=0.4), [1, 3, 4]),
        # min_p comes after top_p, as in transformers: before 4 stands 0.60, not 0.60 / 0.75.
        (drawing(1.0, top_p=0.79, min_p=0.49), [1, 3, 4]),
        (drawing(1.0, top_p=1e-9), [1]),
    ],
)
def test_a_token_is_drawn_from_those_that_every_truncation_keeps(config, kept):
    counts = drawn(config, PROBABILITIES)
    assert np.flatnonzero(counts).tolist() == kept


@pytest.mark.parametrize(
    "config, power",
    [
        (drawing(min_p=0.3), 1.0),
        (drawing(1.7, top_k=5, top_p=0.95, min_p=0.1), 1 / 1.7),
        (drawing(0.7, min_p=0.05), 1 / 0.7),
        (drawing(0.5), 1 / 0.5),
    ],
)
def test_what_is_kept_is_drawn_with_the_models_probabilities(config, power):
    # Of at most 6 degrees of freedom: more than 27.9 is seen once in 10,000 seeds.
    assert chi_square(drawn(config, PROBABILITIES), PROBABILITIES**power) < 27.9


def test_of_equally_likely_tokens_the_first_are_kept_as_greedy_takes_the_first():
    even = np.full(VOCAB, 1 / VOCAB)
    assert np.flatnonzero(drawn(drawing(1.0, top_k=3), even)).tolist() == [0, 1, 2]
    assert np.flatnonzero(drawn(drawing(1.0, top_p=0.30), even)).tolist() == [0, 1, 2]
    zeros = np.zeros((2, VOCAB), np.float32)
    assert each(drawing(0.0), zeros).tolist() == [0, 0]
    assert each(drawing(9.0, top_k=1), zeros).tolist() == [0, 0]


@pytest.mark.parametrize(
    "config", [drawing(min_p=1.0), drawing(1e-36), drawing(1e-36, top_k=5, top_p=0.9, min_p=0.1)]
)
def test_the_narrowest_truncations_are_greedy_at_any_scale(config):
    logits = np.float32(1e4 * np.random.default_rng(2).normal(size=(29, VOCAB)))
    assert np.array_equal(each(config, logits), np.argmax(logits, axis=-1))


def by_hand(logits, prompt, limit, penalty=1.0, ngram=0):
    """Greedy sampling after `prompt`, with a penalty on its tokens and no n-gram twice."""
    text, log_probs = list(prompt), []
    for _ in range(limit):
        row = logits[text[-1]].astype(np.float64)
        lowered = np.where(row > 0, row / penalty, row * penalty)
        scores = np.where(np.isin(np.arange(VOCAB), text), lowered, row)
        runs = [tuple(text[i : i + ngram]) for i in range(len(text) - ngram + 1)] if ngram else []
        repeats = [(*text[len(text) - ngram + 1 :], token) in runs for token in range(VOCAB)]
        text.append(int(np.argmax(np.where(repeats, -np.inf, scores))))
        log_probs.append(row[text[-1]] - np.log(np.exp(row).sum()))
    return text[len(prompt) :], log_probs


PROMPTS = [[2, 6, 1, 0], [3], [4, 4, 5]]
WHOLE = {
    "history": np.array([[2, 6, 1, 0, 0], [3, 0, 0, 0, 0], [4, 4, 5, 0, 0]]),
    "history_lengths": np.array([4, 1, 3]),
}


@pytest.mark.parametrize(
    ("settings", "rules"),
    [({"repetition_penalty": 3.0}, (3.0, 0)), ({"no_repeat_ngram_size": 2}, (1.0, 2))],
)
def test_the_processors_see_the_prompt_and_what_is_made_and_scores_are_the_models_own(
    settings, rules, assert_equal
):
    logits, first, limits = table(seed=4), np.array([0, 3, 5]), np.array([11, 2, 7])
    found = run(logits, first, limits, settings=settings, **WHOLE)
    last = run(logits, first, limits, settings=settings)
    for b in range(3):
        for result, prompt in ((found, PROMPTS[b]), (last, PROMPTS[b][-1:])):
            tokens, log_probs = by_hand(logits, prompt, limits[b], *rules)
            padding = [0] * (11 - limits[b])
            assert result.tokens[b, 0].tolist() == tokens + padding
            assert_equal(result.log_probs[b, 0], log_probs + padding)
            assert_equal(result.scores[b, 0], sum(log_probs))
    assert not np.array_equal(found.tokens, run(logits, first, limits).tokens)
    assert not np.array_equal(found.tokens, last.tokens)
    _, ngram = rules
    if ngram:
        again = run(logits, first, limits, logits_processors=(no_repeat_ngram(ngram),), **WHOLE)
        assert np.array_equal(again.tokens, found.tokens)


def test_the_fewest_tokens_count_from_the_prompt_also_in_a_second_part():
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    logits[:, 6], logits[:, 1] = 2.0, 1.0
    first, limits = np.array([0, 3]), np.array([11, 9])
    settings = {"min_new_tokens": 4}
    found = run(logits, first, limits, settings=settings, eos=(6,)).tokens[:, 0, :6]
    assert found.tolist() == [[1, 1, 1, 1, 6, 0]] * 2
    found = run(logits, first, limits, settings=settings, eos=(6,), written=3).tokens
    assert found[:, 0, :3].tolist() == [[1, 6, 0]] * 2


def test_what_is_suppressed_is_never_written():
    first, limits = np.zeros(31, np.int32), np.full(31, 11)
    settings, rules = {"temperature": 9.0}, (suppress_tokens([1, 4, 5]),)
    found = run(table(), first, limits, settings=settings, logits_processors=rules)
    assert set(np.unique(found.tokens)) == {0, 2, 3, 6}
    assert suppress_tokens([])(jnp.ones(3), None).tolist() == [1.0, 1.0, 1.0]


def test_a_text_without_an_end_goes_on_to_its_limit():
    limits = np.array([11, 3, 0])
    found = run(table(), np.array([1, 2, 3]), limits)
    written = found.log_probs[:, 0] < 0
    assert written.sum(axis=1).tolist() == limits.tolist()
    ends = run(table(), np.array([1, 2, 3]), limits, eos=(int(found.tokens[0, 0, 0]),))
    assert (ends.log_probs[:, 0] < 0).sum(axis=1)[0] == 1


def test_a_text_written_in_two_parts_is_the_text_written_in_one():
    draw = partial(run, table(), settings={"temperature": 1.5}, example_ids=np.array([4, 9, 2, 7]))
    first = np.array([0, 3, 5, 1])
    whole = draw(first, np.full(4, 11)).tokens[:, 0]
    start = draw(first, np.full(4, 5)).tokens[:, 0, :5]
    rest = draw(start[:, -1], np.full(4, 11), written=5).tokens[:, 0, :6]
    assert np.array_equal(np.concatenate([start, rest], axis=1), whole)
    again = draw(start[:, -1], np.full(4, 6)).tokens[:, 0, :6]
    assert not np.array_equal(again, rest)


@pytest.mark.usefixtures("misuse")
def test_sampling_refuses_an_eos_or_a_history_that_does_not_fit():
    first, limits = np.array([0, 3]), np.array([4, 4])
    with pytest.raises(ValueError, match=r"eos=\(7,\)"):
        run(table(), first, limits, eos=(7,))
    with pytest.raises(ValueError, match="history"):
        run(table(), first, limits, history=np.zeros((3, 5), np.int32))
    with pytest.raises(ValueError, match=r"\[7\]"):
        run(table(), first, limits, logits_processors=(suppress_tokens([2, 7]),))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": "1"}, "temperature='1'"),
    ],
)
def test_a_sampler_refuses_what_it_cannot_mean(values, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**values)


def test_a_penalty_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match="repetition_penalty=0.0"):
        SamplingConfig(repetition_penalty=0.0)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_several_keys_are_refused_and_not_taken_for_the_first(make):
    keys = jnp.stack([make(0), make(1)])
    prompts = SamplerInputs(*jnp.ones((2, 2), int), jnp.arange(2))
    with pytest.raises(ValueError, match="rng"):
        unwrap(begin_sampling)(None, prompts, keys)
    with pytest.raises(ValueError, match="key"):
        DropoutRng(keys, jnp.arange(2)).keep_mask("place", (2, 3), 0.5)
