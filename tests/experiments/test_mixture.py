"""A mixture gives rows of several corpora in their shares; a batch depends on (seed, step)."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from experiments.language_modelling.mixture import Mixture
from jaxformer.errors import ConfigError
from jaxformer.text.data import MaskedStream, Stream, Tokens
from jaxformer.text.tokenizers import SpecialTokens

BATCH, LENGTH = 7, 5


def corpus(first, size):
    """A corpus of one document whose ids name it."""
    return Tokens.from_lists([range(first, first + size)], vocab_size=10_000)


def stream(first, size, seed=3, batch_size=BATCH, isolated=False, seq_len=LENGTH):
    shape = {"batch_size": batch_size, "seq_len": seq_len}
    return Stream(corpus(first, size), **shape, seed=seed, isolate_documents=isolated)


STREAMS = [(1_000, 211), (2_000, 89), (3_000, 53)]
WEIGHTS = [0.61, 0.32, 0.07]


@pytest.fixture(scope="module")
def mixture():
    return Mixture([stream(*given) for given in STREAMS], WEIGHTS)


def of(batch):
    """The corpus of each row."""
    return batch.tokens.max(axis=1) // 1_000 - 1


def test_the_shares_hold_within_the_bound_at_every_row(mixture):
    rows = np.concatenate([of(mixture.batch(step)) for step in range(1_200)])
    padded = rows < 0  # rows of a stream's last batch may be empty
    assert padded.mean() < 0.2
    exact = mixture._order[np.arange(len(rows)) % 4096]
    assert np.array_equal(rows[~padded], exact[~padded])
    n = np.arange(1, len(rows) + 1)
    for index, weight in enumerate(WEIGHTS):
        error = np.abs(np.cumsum(exact == index) - weight * n)
        assert np.all(error <= len(WEIGHTS) + n / 4096)


def test_each_corpus_gives_its_rows_in_the_order_of_its_own_stream(mixture):
    given = [stream(*given) for given in STREAMS]
    expected = [
        iter([tuple(row) for step in range(1_400) for row in own.batch(step).tokens])
        for own in given
    ]
    order = iter(mixture._order.tolist() * 2)
    for step in range(700):
        for row in mixture.batch(step).tokens:
            assert tuple(row) == next(expected[next(order)])


def test_a_batch_does_not_depend_on_the_batches_before_nor_on_the_rows_taken(mixture):
    whole = mixture.batch(617)
    again = Mixture([stream(*given) for given in STREAMS], WEIGHTS)
    for own in ([0, 3, 6], [2], [1, 4, 5]):
        part = again.batch(617, lambda _, own=own: np.array(own))
        for leaf, expected in zip(part, whole, strict=True):
            assert (leaf is None) == (expected is None)
            if leaf is not None:
                np.testing.assert_array_equal(leaf, expected[own])
                assert leaf.dtype == expected.dtype
    assert whole.example_ids.tolist() == list(range(BATCH))
    assert again.fingerprint == mixture.fingerprint


def test_another_share_stream_or_seed_is_another_fingerprint(mixture):
    others = [
        Mixture([stream(*given) for given in STREAMS], [0.6, 0.33, 0.07]),
        Mixture([stream(*given, seed=4) for given in STREAMS], WEIGHTS),
        Mixture([stream(*given) for given in STREAMS[:2]], WEIGHTS[:2]),
        mixture,
    ]
    assert len({other.fingerprint for other in others}) == 4


def test_weights_are_relative_and_a_small_one_still_counts():
    pair = [stream(*given) for given in STREAMS[:2]]
    assert Mixture(pair, [2, 6]).fingerprint == Mixture(pair, [0.25, 0.75]).fingerprint
    counts = Counter(Mixture(pair, [1.0, 1e-9])._order.tolist())
    assert counts == {0: 4095, 1: 1}
    places = np.flatnonzero(Mixture(pair, [3, 1])._order == 1)
    assert {b - a for a, b in pairwise(places.tolist())} == {4}, "spread evenly"


@pytest.mark.parametrize("other", [{"isolated": True}, {"seq_len": 11}, {"batch_size": 5}])
@pytest.mark.parametrize("turned", [False, True])
def test_streams_of_different_rows_are_refused_in_either_order(other, turned):
    streams = [stream(*STREAMS[0]), stream(*STREAMS[1], **other)]
    with pytest.raises(ConfigError, match="the rows of a mixture must have one form"):
        Mixture(streams[::-1] if turned else streams, [0.5, 0.5])


def test_masked_rows_are_mixed_too():
    special = SpecialTokens(pad=0, bos=1, eos=2, mask=4)
    shape = {"batch_size": BATCH, "seq_len": 11, "special": special, "vocab_size": 10_000}
    streams = [MaskedStream(corpus(*given), **shape, seed=3) for given in STREAMS]
    batch = Mixture(streams, WEIGHTS).batch(5)
    assert batch.tokens.shape == (BATCH, 11) and len(batch.next_sentence) == BATCH


@pytest.mark.parametrize("weights", [[1.0, 2.0], [0.0], []])
def test_weights_that_do_not_fit_the_streams_are_refused(weights):
    with pytest.raises(ConfigError, match="a mixture needs a weight above 0 for each stream"):
        Mixture([stream(*STREAMS[0])], weights)
