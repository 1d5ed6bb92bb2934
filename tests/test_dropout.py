import itertools
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer.dropout import Dropout, Noise

WORDS = np.array([123, 456], np.uint32)
ROWS = np.arange(64, dtype=np.int32)
SHAPE = (61, 127)  # positions, features


@partial(jax.jit, static_argnames=("site", "shape", "rate"))
def keep(words, row, site="a", shape=SHAPE, rate=0.1):
    return Noise(words, row).keep(site, (len(row), *shape), rate)


@dataclass(frozen=True)
class Masks:
    """A mask and others that differ from it in one thing."""

    base: np.ndarray
    others: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def masks() -> Masks:
    base = np.asarray(keep(WORDS, ROWS))
    others = {}
    for word, bit in itertools.product((0, 1), range(32)):
        words = WORDS.copy()
        words[word] ^= np.uint32(1 << bit)
        others[f"word {word} bit {bit}"] = np.asarray(keep(words, ROWS))
    others["word 0 +1"] = np.asarray(keep(WORDS + np.uint32([1, 0]), ROWS))
    others["word 1 +1"] = np.asarray(keep(WORDS + np.uint32([0, 1]), ROWS))
    others["both words +1"] = np.asarray(keep(WORDS + np.uint32(1), ROWS))
    others["words swapped"] = np.asarray(keep(WORDS[::-1].copy(), ROWS))
    others["site"] = np.asarray(keep(WORDS, ROWS, site="b"))
    others["rows +1"] = np.asarray(keep(WORDS, ROWS + 1))
    others["rows +64"] = np.asarray(keep(WORDS, ROWS + 64))
    others["positions +1"] = np.roll(base, 1, axis=1)
    others["features +1"] = np.roll(base, 1, axis=2)
    return Masks(base, others)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_rate(rate):
    dropped = 1.0 - np.asarray(keep(WORDS, ROWS, rate=rate))
    deviation = np.sqrt(rate * (1 - rate) / dropped.size)
    assert abs(dropped.mean() - rate) < 5 * deviation
    for axis in range(3):
        lines = dropped.mean(axis=axis)
        expected = np.sqrt(rate * (1 - rate) / dropped.shape[axis])
        assert 0.9 * expected < lines.std() < 1.1 * expected


def test_neighbouring_masks_are_uncorrelated(masks):
    def correlation(other):
        a, b = masks.base - masks.base.mean(), other - other.mean()
        return (a * b).mean() / (a.std() * b.std())

    leaks = {name: correlation(other) for name, other in masks.others.items()}
    bound = 5.0 / np.sqrt(masks.base.size)
    assert {name: leak for name, leak in leaks.items() if abs(leak) > bound} == {}


def test_neighbouring_steps_are_uncorrelated(masks):
    steps = [jax.random.fold_in(jax.random.key(7), step) for step in range(4)]
    drawn = [np.asarray(keep(Noise.of(rng, ROWS).words, ROWS)).ravel() for rng in steps]
    leaks = np.corrcoef(np.float32(drawn)) - np.eye(4)
    assert np.abs(leaks).max() < 5.0 / np.sqrt(masks.base.size)


def test_a_row_has_its_mask_in_whatever_batch_it_stands(masks):
    some = np.array([41, 3, 17], np.int32)
    assert np.array_equal(keep(WORDS, some), masks.base[some])


def test_a_longer_or_wider_array_repeats_the_mask(masks):
    larger = np.asarray(keep(WORDS, ROWS, shape=(67, 131)))
    assert np.array_equal(larger[:, :61, :127], masks.base)


def test_a_part_of_the_mask_is_computed_from_where_it_starts():
    noise = jax.tree.map(jax.numpy.asarray, Noise(WORDS, ROWS[:2]))
    whole = np.asarray(noise.keep("a", (2, 3, 11, 13), 0.4))
    part = jax.jit(lambda *start: noise.keep("a", (2, 2, 5, 7), 0.4, start=start))
    for head, query, key in [(0, 0, 0), (1, 6, 6), (0, 3, 1)]:
        expected = whole[:, head : head + 2, query : query + 5, key : key + 7]
        assert np.array_equal(part(head, query, key), expected)


def test_the_mask_of_attention_weights_differs_from_head_to_head():
    weights = np.asarray(keep(WORDS, ROWS[:2], shape=(3, 31, 37), rate=0.5))
    assert weights.shape == (2, 3, 31, 37)
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert abs((weights[:, a] == weights[:, b]).mean() - 0.5) < 0.06


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    noise = Noise.of(jax.random.key(3), np.arange(2))
    x = np.full((2, 61, 127), 3.0, np.float32)
    y = np.asarray(jax.jit(lambda x: Dropout(noise, "a", 0.25)(x))(x))
    assert set(np.unique(y)) == {0.0, 4.0}
    assert np.array_equal(y != 0, noise.keep("a", x.shape, 0.25))


def test_without_noise_or_rate_nothing_happens(rng):
    x = rng.standard_normal((2, 3, 5))
    noise = Noise.of(jax.random.key(3), np.arange(2))
    assert Dropout(None, "a", 0.5)(x) is x
    assert Dropout(noise, "a", 0.0)(x) is x
