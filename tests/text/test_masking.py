"""Masked rows: how many tokens are hidden and how, what they were, and which text follows which."""

import hashlib

import numpy as np
import pytest

from jaxformer.text.data import MaskedBatch, MaskedStream, Tokens
from jaxformer.text.tokenizers import SpecialTokens

PAD, BOS, EOS, UNK, MASK = 0, 1, 2, 3, 4
SPECIAL = SpecialTokens(pad=PAD, bos=BOS, eos=EOS, unk=UNK, mask=MASK)
FIRST = 5  # the first ordinary id


def counted(*lengths: int) -> Tokens:
    """Documents of these lengths, of which every id tells its place in the whole."""
    total = sum(lengths)
    return Tokens(np.arange(FIRST, FIRST + total, dtype=np.uint32), np.cumsum([0, *lengths]))


def stream(tokens: Tokens, **change) -> MaskedStream:
    base = {"batch_size": 3, "seq_len": 23, "seed": 2, "special": SPECIAL, "vocab_size": 5003}
    return MaskedStream(tokens, **base | change)


def epoch(masked: MaskedStream, number: int = 0) -> list[MaskedBatch]:
    steps = masked.steps_per_epoch
    return [masked.batch(step) for step in range(number * steps, (number + 1) * steps)]


def originals(batch: MaskedBatch) -> np.ndarray:
    """[B, T] the tokens as they were before masking."""
    tokens = batch.tokens.copy()
    rows = np.arange(len(tokens))[:, None]
    kept = tokens[rows, batch.masked_positions]
    tokens[rows, batch.masked_positions] = np.where(batch.loss_mask, batch.labels, kept)
    return tokens


def digest(batch: MaskedBatch) -> str:
    parts = [repr((x.dtype.str, x.shape)).encode() + x.tobytes() for x in batch]
    return hashlib.sha256(b"".join(parts)).hexdigest()


# Rows


def test_a_row_is_bos_a_window_and_eos():
    for batch in epoch(stream(counted(997))):
        whole = originals(batch)
        for row, present in zip(whole, batch.padding_mask, strict=True):
            size = int(present.sum())
            assert present[:size].all() and (row[size:] == PAD).all()
            if size:
                assert (row[0], row[size - 1]) == (BOS, EOS)
                assert (np.diff(row[1 : size - 1]) == 1).all()
        assert not batch.token_type_ids.any() and not batch.next_sentence.any()
        assert batch.example_ids.tolist() == [0, 1, 2]


def test_every_token_lies_in_exactly_one_row_an_epoch():
    masked = stream(counted(500, 0, 497))
    for number in range(3):
        found = np.concatenate([originals(batch).ravel() for batch in epoch(masked, number)])
        assert np.array_equal(np.sort(found[found >= FIRST]), np.arange(FIRST, FIRST + 997))


def test_labels_are_the_originals_and_all_else_is_left_as_it_was():
    for batch in epoch(stream(counted(997))):
        whole = originals(batch)
        changed = np.argwhere(batch.tokens != whole)
        chosen = {(r, c) for r in range(3) for c in batch.masked_positions[r][batch.loss_mask[r]]}
        assert set(map(tuple, changed)) <= chosen
        assert (
            np.diff(np.where(batch.loss_mask, batch.masked_positions, 23 + np.arange(3))) > 0
        ).all()
        assert (batch.labels[~batch.loss_mask] == 0).all() and (
            batch.masked_positions[~batch.loss_mask] == 0
        ).all()


# How many and how


@pytest.mark.parametrize(
    ("length", "rate", "count"), [(23, 0.15, 3), (5, 0.15, 1), (4, 0.05, 1), (128, 0.15, 19)]
)
def test_so_many_tokens_of_a_full_row_are_chosen(length, rate, count):
    seen = 0
    for batch in epoch(stream(counted(15 * length), seq_len=length, mask_prob=rate)):
        assert (
            batch.masked_positions.shape
            == batch.labels.shape
            == batch.loss_mask.shape
            == (3, count)
        )
        full = batch.padding_mask.all(axis=1)
        assert (batch.loss_mask[full].sum(axis=1) == count).all()
        seen += full.sum()
        short = batch.padding_mask.sum(axis=1)[~full]
        expected = np.where(short > 0, np.maximum(np.rint(rate * short), 1), 0)
        assert (batch.loss_mask[~full].sum(axis=1) == expected).all()
    assert seen > 10


def test_of_ten_chosen_tokens_eight_are_hidden_one_is_another_and_one_stays():
    masked = stream(counted(4801), batch_size=13, seq_len=128)
    hidden = stayed = total = 0
    others = []
    for batch in (masked.batch(step) for step in range(120)):
        found = np.take_along_axis(batch.tokens, batch.masked_positions, axis=1)[batch.loss_mask]
        labels = batch.labels[batch.loss_mask]
        hidden += (found == MASK).sum()
        stayed += (found == labels).sum()
        total += len(found)
        others.append(found[(found != MASK) & (found != labels)])
    others = np.concatenate(others)
    assert total > 20_000
    # Four standard deviations of a share of 0.8 and of 0.1 of so many.
    assert abs(hidden / total - 0.8) < 4 * (0.16 / total) ** 0.5
    assert abs(stayed / total - 0.1) < 4 * (0.09 / total) ** 0.5
    assert abs(len(others) / total - 0.1) < 4 * (0.09 / total) ** 0.5
    assert others.min() >= FIRST and others.max() < 5003
    assert len(np.unique(others)) > 0.3 * len(others)


def test_every_place_of_a_row_is_chosen_equally_often():
    masked = stream(counted(4801), batch_size=31, seq_len=23)
    places = [
        b.masked_positions[b.padding_mask.all(1)] for b in (masked.batch(s) for s in range(80))
    ]
    counts = np.bincount(np.concatenate(places).ravel(), minlength=23)
    assert counts[0] == counts[22] == 0
    expected = counts.sum() / 21
    # 20 degrees of freedom: more than 50 has a probability of 2e-4.
    assert ((counts[1:22] - expected) ** 2 / expected).sum() < 50


@pytest.mark.parametrize("pairs", [False, True])
def test_special_tokens_are_never_chosen_and_never_put_in(pairs):
    ids = np.random.Philox(key=3).random_raw(997) % 11  # nearly half of them special
    tokens = Tokens(ids.astype(np.uint32), np.array([0, 401, 997]))
    for batch in epoch(stream(tokens, vocab_size=11, mask_prob=0.6, next_sentence=pairs)):
        assert (batch.labels[batch.loss_mask] >= FIRST).all()
        found = np.take_along_axis(batch.tokens, batch.masked_positions, axis=1)[batch.loss_mask]
        assert ((found == MASK) | (found >= FIRST)).all()
        candidates = (originals(batch) >= FIRST).sum(axis=1)
        wanted = np.rint(0.6 * batch.padding_mask.sum(axis=1))
        assert (batch.loss_mask.sum(axis=1) == np.minimum(wanted, candidates)).all()


# Pure


def test_masks_are_new_in_every_epoch():
    masked = stream(counted(997))
    chosen = [{int(i) for b in epoch(masked, e) for i in b.labels[b.loss_mask]} for e in range(3)]
    for one, other in ((0, 1), (1, 2)):
        share = len(chosen[one] & chosen[other]) / len(chosen[one])
        assert share < 0.3
    again = masked.batch(masked.steps_per_epoch), masked.batch(2 * masked.steps_per_epoch)
    assert len({x.masked_positions.tobytes() for x in (masked.batch(0), *again)}) == 3


# Pairs


def halves(row: np.ndarray, types: np.ndarray, present: np.ndarray) -> tuple[list, list]:
    """A and B of a row bos A eos B eos."""
    a, b = row[present & (types == 0)], row[present & (types == 1)]
    assert (a[0], a[-1], b[-1]) == (BOS, EOS, EOS)
    return a[1:-1].tolist(), b[:-1].tolist()


def test_b_follows_a_or_is_of_another_document_as_the_label_says():
    lengths = (211, 1, 0, 7, 2, 307, 13, 1, 401)
    tokens = counted(*lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    masked, follows, rows, sizes = (
        stream(tokens, batch_size=7, next_sentence=True),
        0,
        0,
        {0: [], 1: []},
    )
    for batch in (batch for number in range(6) for batch in epoch(masked, number)):
        assert (batch.token_type_ids[~batch.padding_mask] == 0).all()
        assert (batch.tokens[~batch.padding_mask] == PAD).all()
        for r in np.flatnonzero(batch.padding_mask.any(axis=1)):
            a, b = halves(originals(batch)[r], batch.token_type_ids[r], batch.padding_mask[r])
            text = np.array(a + b) - FIRST
            assert len(a) >= 1 and len(b) >= 1 and len(text) <= 20
            assert len(set(owner[np.array(a) - FIRST])) == len(set(owner[np.array(b) - FIRST])) == 1
            if batch.next_sentence[r]:
                assert (np.diff(text) == 1).all() and len(set(owner[text])) == 1
            else:
                assert owner[text[0]] != owner[text[-1]]
                assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
            if lengths[owner[text[0]]] > 20:
                sizes[int(batch.next_sentence[r])].append(len(a))
            follows, rows = follows + int(batch.next_sentence[r]), rows + 1
    assert rows > 250 and abs(follows / rows - 0.5) < 4 * 0.5 / rows**0.5
    # The cut is drawn alike for both.
    assert abs(np.mean(sizes[0]) - np.mean(sizes[1])) < 1.5


def test_rows_of_pairs_are_full_where_documents_are_long_enough():
    batches = epoch(stream(counted(307, 401), batch_size=7, next_sentence=True))
    sizes = np.concatenate([batch.padding_mask.sum(axis=1) for batch in batches])
    assert (sizes[sizes > 0] == 23).all() and (sizes == 0).sum() < 8


# The whole, in order


@pytest.mark.parametrize("total", [1, 20, 21, 22, 63, 100])
def test_a_masked_cover_goes_through_the_whole_in_order_with_fixed_masks(total):
    batches = list(stream(counted(total)).once())
    found = np.concatenate([originals(batch).ravel() for batch in batches])
    assert found[found >= FIRST].tolist() == list(range(FIRST, FIRST + total))
    assert all(batch.tokens.shape == (3, 23) for batch in batches)
    again = stream(counted(total)).once()
    assert [digest(batch) for batch in again] == [digest(batch) for batch in batches]


def test_a_cover_in_pairs_is_made_of_rows_of_both_kinds_from_the_whole_text():
    tokens = counted(211, 1, 307, 13, 401)
    owner = np.repeat(np.arange(5), tokens.lengths)
    batches, again = (
        list(stream(tokens, next_sentence=True, batch_size=7).once()) for _ in range(2)
    )
    assert [digest(batch) for batch in again] == [digest(batch) for batch in batches]
    kinds, firsts = [], []
    for batch in batches:
        for r in np.flatnonzero(batch.padding_mask.any(axis=1)):
            a, b = halves(originals(batch)[r], batch.token_type_ids[r], batch.padding_mask[r])
            together = owner[a[0] - FIRST] == owner[b[0] - FIRST]
            assert together == bool(batch.next_sentence[r])
            kinds.append(together)
            firsts.append(a[0] - FIRST)
    assert len(kinds) == -(-933 // 20) and 0.2 < np.mean(kinds) < 0.8
    assert firsts == sorted(firsts) and set(owner[firsts]) >= {0, 2, 4}
