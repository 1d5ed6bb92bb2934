import itertools
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer.ops.dropout import DropoutMask, DropoutRng

KEY_DATA = np.array([123, 456], np.uint32)
EXAMPLE_IDS = np.arange(64, dtype=np.int32)
SHAPE = (61, 127)  # positions, features


@partial(jax.jit, static_argnames=("name", "shape", "rate"))
def keep(key, example_ids, name="a", shape=SHAPE, rate=0.1):
    return DropoutRng(key, example_ids).keep_mask(name, (len(example_ids), *shape), rate)


@dataclass(frozen=True)
class Masks:
    """A mask and others that differ from it in one thing."""

    base: np.ndarray
    others: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def masks() -> Masks:
    base = np.asarray(keep(KEY_DATA, EXAMPLE_IDS))
    others = {}
    for word, bit in itertools.product((0, 1), range(32)):
        words = KEY_DATA.copy()
        words[word] ^= np.uint32(1 << bit)
        others[f"word {word} bit {bit}"] = np.asarray(keep(words, EXAMPLE_IDS))
    others["word 0 +1"] = np.asarray(keep(KEY_DATA + np.uint32([1, 0]), EXAMPLE_IDS))
    others["word 1 +1"] = np.asarray(keep(KEY_DATA + np.uint32([0, 1]), EXAMPLE_IDS))
    others["both words +1"] = np.asarray(keep(KEY_DATA + np.uint32(1), EXAMPLE_IDS))
    others["words swapped"] = np.asarray(keep(KEY_DATA[::-1].copy(), EXAMPLE_IDS))
    others["name"] = np.asarray(keep(KEY_DATA, EXAMPLE_IDS, name="b"))
    others["example ids +1"] = np.asarray(keep(KEY_DATA, EXAMPLE_IDS + 1))
    others["example ids +64"] = np.asarray(keep(KEY_DATA, EXAMPLE_IDS + 64))
    others["positions +1"] = np.roll(base, 1, axis=1)
    others["features +1"] = np.roll(base, 1, axis=2)
    return Masks(base, others)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_rate(rate):
    dropped = 1.0 - np.asarray(keep(KEY_DATA, EXAMPLE_IDS, rate=rate))
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
    drawn = [np.asarray(keep(rng, EXAMPLE_IDS)).ravel() for rng in steps]
    leaks = np.corrcoef(np.float32(drawn)) - np.eye(4)
    assert np.abs(leaks).max() < 5.0 / np.sqrt(masks.base.size)


def test_the_mask_of_an_example_does_not_depend_on_its_batch(masks):
    some = np.array([41, 3, 17], np.int32)
    assert np.array_equal(keep(KEY_DATA, some), masks.base[some])


def test_a_longer_or_wider_array_repeats_the_mask(masks):
    larger = np.asarray(keep(KEY_DATA, EXAMPLE_IDS, shape=(67, 131)))
    assert np.array_equal(larger[:, :61, :127], masks.base)


def test_a_part_of_the_mask_is_computed_from_where_it_starts():
    dropout_rng = jax.tree.map(jax.numpy.asarray, DropoutRng(KEY_DATA, EXAMPLE_IDS[:2]))
    whole = np.asarray(jax.jit(lambda: dropout_rng.keep_mask("a", (2, 3, 11, 13), 0.4))())
    part = jax.jit(lambda *start: dropout_rng.keep_mask("a", (2, 2, 5, 7), 0.4, start=start))
    for head, query, key in [(0, 0, 0), (1, 6, 6), (0, 3, 1)]:
        expected = whole[:, head : head + 2, query : query + 5, key : key + 7]
        assert np.array_equal(part(head, query, key), expected)


def test_the_mask_of_attention_weights_differs_from_head_to_head():
    weights = np.asarray(keep(KEY_DATA, EXAMPLE_IDS[:2], shape=(3, 31, 37), rate=0.5))
    assert weights.shape == (2, 3, 31, 37)
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert abs((weights[:, a] == weights[:, b]).mean() - 0.5) < 0.06


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    dropout_rng = DropoutRng(jax.random.key(3), np.arange(2))
    x = np.full((2, 61, 127), 3.0, np.float32)

    @jax.jit
    def both(x):
        return DropoutMask(dropout_rng, "a", 0.25)(x), dropout_rng.keep_mask("a", x.shape, 0.25)

    y, kept = map(np.asarray, both(x))
    assert set(np.unique(y)) == {0.0, 4.0}
    assert np.array_equal(y != 0, kept)
