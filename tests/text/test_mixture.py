"""Mixtures: shares of every stretch, batches as functions of the step, refusals."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError
from jaxformer.text.data import MaskedStream, Mixture, Stream, Tokens
from jaxformer.text.tokenizers import SpecialTokens
from tests.text.examples import examples

NAMES = ("a", "b", "c")
LENGTHS = (211, 307, 1009)
SPECIAL = SpecialTokens(bos=1, eos=2, mask=3)


def texts() -> dict[str, Tokens]:
    """Three texts of unequal length; ids tell the text, and the place in it."""
    return {
        name: Tokens.from_lists([range(1000 * i + 10, 1000 * i + 10 + length // i) for _ in "ab"])
        for i, (name, length) in enumerate(zip(NAMES, LENGTHS, strict=True), start=1)
    }


def mixed(shares, batch_size: int = 5, *, isolate: bool = False, seed: int = 3) -> Mixture:
    options = {"batch_size": batch_size, "seq_len": 7, "seed": seed, "isolate_documents": isolate}
    sources = {
        name: Stream(text, **options)
        for name, text in zip(NAMES, texts().values(), strict=True)
        if name in shares
    }
    return Mixture(sources, shares)


@examples
@given(weights=st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_every_beginning_has_its_shares_but_for_less_than_one_of_each(weights):
    options = {"batch_size": 3, "seq_len": 7, "seed": 1, "isolate_documents": False}
    source = Stream(Tokens.from_lists([[5] * 97]), **options)
    names = [str(i) for i in range(len(weights))]
    mixture = Mixture(dict.fromkeys(names, source), dict(zip(names, weights, strict=True)))
    order, places = mixture.places(np.arange(3 * sum(weights)))
    for number, weight in enumerate(weights):
        counts = np.cumsum(np.append(0, order == number))
        share = np.arange(len(counts)) * weight / sum(weights)
        apart = counts - share
        assert abs(apart).max() < 1
        assert apart.max() - apart.min() < (1 if len(weights) == 2 else 2)  # of any stretch
        assert places[order == number].tolist() == list(range(counts[-1]))  # each once, in order


def test_rows_are_the_sources_own_and_each_is_read_whole_before_it_begins_again():
    shares = {"a": 0.5, "b": 0.2, "c": 0.3}
    mixture = mixed(shares)
    rows = {name: rows_of(source) for name, source in mixture.sources.items()}
    read = dict.fromkeys(NAMES, 0)
    for step in range(2 * mixture.steps_per_epoch):
        batch = mixture.batch(step)
        numbers, _ = mixture.places(5 * step + np.arange(5))
        assert batch.example_ids.tolist() == [0, 1, 2, 3, 4]
        for i, number in enumerate(numbers):
            tokens, mask = next(rows[NAMES[number]])
            np.testing.assert_array_equal(batch.tokens[i], tokens)
            np.testing.assert_array_equal(batch.loss_mask[i], mask)
            read[NAMES[number]] += 1
        passes = mixture.passes(step + 1)
        for name in NAMES:
            assert passes[name] == read[name] / mixture.sources[name].rows_per_epoch
            assert abs(read[name] - shares[name] * 5 * (step + 1)) < 1
        assert (min(passes.values()) >= 1) == (step + 1 >= mixture.steps_per_epoch)


def rows_of(source):
    """The rows of a source one after the other, without those that fill up an epoch."""
    for step in itertools.count():
        batch = source.batch(step)
        first = step % source.steps_per_epoch * source.batch_size
        real = source.rows_per_epoch - first
        yield from list(zip(batch.tokens, batch.loss_mask, strict=True))[:real]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_process_gets_its_rows_of_the_batch_and_reads_no_others(isolate):
    mixture = mixed({"a": 1, "b": 5, "c": 2}, batch_size=7, isolate=isolate)
    for step in (0, 1, 97, 3001):
        whole = mixture.batch(step)
        for chosen in ([0, 1, 2], [3, 6], [], [5]):
            part = mixture.batch(step, lambda _, chosen=chosen: np.array(chosen, np.int64))
            for one, all_rows in zip(part, whole, strict=True):
                assert (one is None) == (all_rows is None) == (not isolate and one is None)
                if one is not None:
                    np.testing.assert_array_equal(one, all_rows[np.array(chosen, int)])


def test_masked_rows_are_mixed_too():
    options = {"batch_size": 5, "seq_len": 11, "seed": 3, "special": SPECIAL, "vocab_size": 4000}
    sources = {name: MaskedStream(text, **options) for name, text in texts().items()}
    mixture = Mixture(sources, {"a": 1, "b": 1, "c": 2})
    batch = mixture.batch(3)
    assert batch.tokens.shape == (5, 11) and batch.example_ids.tolist() == [0, 1, 2, 3, 4]
    assert {int(x) // 1000 for x in batch.labels[batch.loss_mask]} == {1, 2, 3}


def test_the_fingerprint_sees_texts_shares_seed_and_batch_size():
    even = {"a": 1, "b": 1}
    kinds = [
        mixed(even),
        mixed({"a": 1, "b": 2}),
        mixed({"a": 1, "c": 1}),
        mixed(even, 7),
        mixed(even, seed=4),
    ]
    assert len({mixture.fingerprint for mixture in kinds}) == len(kinds)
    assert mixed({"a": 0.5, "b": 0.5}).fingerprint == mixed(even).fingerprint


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.7, "b": 0.0}, "the share of b is 0.0"),
        ({"a": 0.7, "b": -1}, "the share of b is -1"),
        ({"a": float("nan"), "b": 1}, "the share of a is nan"),
        ({"a": float("inf"), "b": 1}, "the share of a is inf"),
        ({"a": 0.123457, "b": 0.3}, "a=0.123457, b=0.3"),
    ],
)
def test_shares_that_are_none_are_refused_with_their_name(shares, message):
    with pytest.raises(ConfigError, match=message):
        mixed(shares)


def test_shares_of_other_sources_and_sources_of_two_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"sources .*\['a', 'b'\].* shares .*\['a'"):
        Mixture(mixed({"a": 1, "b": 1}).sources, {"a": 1, "c": 1})
    sizes = {"a": mixed({"a": 1}).sources["a"], "b": mixed({"b": 1}, 7).sources["b"]}
    with pytest.raises(ConfigError, match=r"\[5, 7\]"):
        Mixture(sizes, {"a": 1, "b": 1})
    sources = {
        "a": mixed({"a": 1}).sources["a"],
        "b": mixed({"b": 1}, isolate=True).sources["b"],
    }
    with pytest.raises(ConfigError, match="array"):
        Mixture(sources, {"a": 1, "b": 1}).batch(0)
