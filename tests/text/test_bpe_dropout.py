"""BPE-dropout: random segmentations that decode to the text, the same for the same seed."""

import numpy as np
import pytest

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import bucket_pairs, encode_pairs
from jaxformer.text.tokenizers import (
    BOS,
    EOS,
    Tokenizer,
    sample_encodings,
    train_bpe,
    train_characters,
    train_words,
)

LINES = [
    "the lower the river the newer the tower",
    "",
    "  lowest  newest\ttowers, 17 rivers; <pad> and </s>",
    "Größe übt der Ärger — 漢字 and 😀 too",
    "towers towers towers towers towers towers",
]
OTHERS = ["der Fluss", "   ", "der Turm und die Türme", "neu", "Türme, Türme; Flüsse"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([*LINES, *OTHERS] * 3, 367)


def test_without_dropout_the_ids_are_the_tokenizers_own(tokenizer, rng):
    assert list(sample_encodings(LINES, tokenizer, 0.0, seed=5)) == tokenizer.encode_batch(LINES)
    words = ["".join(rng.choice(list("abc"), 23)) for _ in range(97)]  # whose merges overlap
    tokenizer = train_bpe(words[:41], 331)
    assert list(sample_encodings(words, tokenizer, 0.0, seed=5)) == tokenizer.encode_batch(words)


@pytest.mark.parametrize("rate", [0.1, 0.7, 1.0])
def test_a_segmentation_decodes_to_the_text(tokenizer, rate):
    for seed in range(5):
        ids = list(sample_encodings(LINES, tokenizer, rate, seed=seed))
        assert tokenizer.decode_batch(ids) == LINES
    if rate == 1.0:
        assert len(ids[0]) == 1 + len(LINES[0])  # the space before it


def test_the_seed_decides_the_segmentation(tokenizer):
    first, again, other = (
        list(sample_encodings(LINES, tokenizer, 0.3, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    words = {tuple(ids) for ids in sample_encodings(["towers"] * 97, tokenizer, 0.3, seed=1)}
    assert 3 < len(words) <= 64


def test_as_many_merges_are_left_out_as_asked():
    tokenizer = train_bpe(["ab"], 262)  # two merges: the space before it and "a", then "b"
    samples = sample_encodings(["ab"] * 4_001, tokenizer, 0.25, seed=7)
    lengths = [len(ids) for ids in samples]
    # All three are one with (3/4)^2; there are 64 draws of this word.
    assert 0.4 < np.mean(np.array(lengths) == 1) < 0.72


@pytest.mark.parametrize("train", [train_characters, lambda lines: train_words(lines, 31)])
def test_a_vocabulary_without_merges_is_refused(train):
    with pytest.raises(ConfigError, match="bpe_dropout needs a byte-level BPE"):
        next(sample_encodings(LINES, train(LINES), 0.1, seed=0))


def test_a_vocabulary_whose_words_need_no_merges_is_refused(tokenizer):
    library = tokenizer.library_tokenizer
    other = type(library).from_str(library.to_str())
    other.model.ignore_merges = True
    with pytest.raises(ConfigError, match="bpe_dropout needs a byte-level BPE"):
        next(sample_encodings(LINES, Tokenizer(other), 0.1, seed=0))


@pytest.fixture(scope="module")
def batches(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    sides = encode_pairs(LINES, OTHERS, tokenizer, folder, bpe_dropout=0.3, encodings=7)

    def make(seed=3):
        return bucket_pairs(*sides, seed=seed, batch_tokens=97, buckets=2, max_len=71, encodings=7)

    return make


def texts(batch, tokenizer):
    rows = zip(batch.source, batch.target, strict=True)
    ids = [[list(row[: list(row).index(EOS)]) for row in pair] for pair in rows if EOS in pair[0]]
    return sorted(tuple(tokenizer.decode_batch(pair)) for pair in ids)


def test_an_epoch_has_each_pair_once_in_one_of_its_segmentations(batches, tokenizer):
    found, seen = batches(), set()
    assert found.dropped == {"empty": 1, "too_long": 0}
    for epoch in range(5):
        steps = range(epoch * found.steps_per_epoch, (epoch + 1) * found.steps_per_epoch)
        rows = [found.batch(step) for step in steps]
        pairs = sorted(pair for batch in rows for pair in texts(batch, tokenizer))
        assert pairs == sorted((LINES[i], OTHERS[i]) for i in (0, 2, 3, 4))
        seen |= {tuple(row) for batch in rows for row in batch.source if row[0] != 0}
        assert all(row[0] == BOS for batch in rows for row in batch.target if row.any())
    assert len(seen) > 2 * 4


def test_a_batch_of_segmentations_depends_on_nothing_but_seed_and_step(batches):
    found, again, other = batches(), batches(), batches(4)
    for step in (9, 2, 11, 2):
        for given, expected in zip(again.batch(step), batches().batch(step), strict=True):
            np.testing.assert_array_equal(given, expected)
    assert found.fingerprint == again.fingerprint != other.fingerprint


def test_sequences_that_are_no_whole_texts_are_refused(batches):
    found = batches()
    with pytest.raises(DataError, match="35 sequences are not 4 segmentations of each sentence"):
        bucket_pairs(
            found.source,
            found.target,
            seed=0,
            batch_tokens=97,
            buckets=2,
            max_len=71,
            encodings=4,
        )
