"""What all data sets promise: batches of a seed and a step alone, each host's rows, refusals."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxformer.distributed import single
from jaxformer.errors import ConfigError, DataError
from jaxformer.text import data
from jaxformer.text.data import MaskedStream, Stream, Tokens
from jaxformer.text.tokenizers import SpecialTokens

LENGTHS = (5, 0, 1, 17, 2, 0, 31, 3, 13, 1, 29)
SPECIAL = SpecialTokens(pad=0, bos=1, eos=2, unk=3, mask=4)
VOCAB_SIZE = 131


class Watched(Tokens):
    """Tokens that note which places of them are read."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        super().__init__(ids, offsets)
        self.read: set[int] = set()

    def take(self, places: np.ndarray) -> np.ndarray:
        self.read.update(np.unique(places).tolist())
        return super().take(places)

    def rows(self, starts: np.ndarray, counts: np.ndarray, length: int) -> np.ndarray:
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            self.read.update(range(start, start + count))
        return super().rows(starts, counts, length)


def documents(lengths: tuple[int, ...] = LENGTHS) -> Tokens:
    return Tokens(np.arange(5, 5 + sum(lengths), dtype=np.uint32), np.cumsum([0, *lengths]))


def sentences(seed: int, count: int = 61) -> Tokens:
    rng = np.random.default_rng(seed)
    return Tokens.from_lists([rng.integers(5, 97, n).tolist() for n in rng.integers(1, 23, count)])


def sentence_pairs(source: Tokens, **sizes: int) -> data.PairBatches:
    return data.bucket_pairs(source, sentences(2, len(source)), **sizes)


SHAPE = {"batch_size": 8, "seq_len": 7, "seed": 3}
MASKED = SHAPE | {"special": SPECIAL, "vocab_size": VOCAB_SIZE, "next_sentence": False}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one text": (Stream, SHAPE | {"isolate_documents": False}),
    "documents": (Stream, SHAPE | {"isolate_documents": True}),
    "masked": (MaskedStream, MASKED),
    "masked pairs": (MaskedStream, MASKED | {"next_sentence": True}),
    "sentence pairs": (
        sentence_pairs,
        {"seed": 5, "batch_tokens": 128, "buckets": 3, "max_len": 31}
        | {"pad_to_multiple": 4, "batch_size_multiple": 8},
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def text_of(kind: str) -> Tokens:
    return sentences(1) if kind == "sentence pairs" else documents()


def batches_of(kind: str, text: Tokens | None = None, **changes: Any) -> Any:
    make, settings = KINDS[kind]
    return make(text_of(kind) if text is None else text, **settings | changes)


def digest(batch: Any) -> str:
    """Equal for batches of the same bytes."""
    parts = [
        repr((leaf.dtype.str, leaf.shape)).encode() + leaf.tobytes()
        for leaf in batch
        if leaf is not None
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


# Pure


@every_kind
def test_a_batch_depends_on_seed_and_step_alone(kind):
    whole = batches_of(kind)
    straight = [digest(whole.batch(step)) for step in range(3 * whole.steps_per_epoch)]
    assert len(set(straight)) == len(straight) > 5
    again = batches_of(kind)
    for step in np.random.default_rng(7).permutation(len(straight)):
        assert digest(again.batch(step)) == digest(batches_of(kind).batch(step)) == straight[step]
    assert digest(batches_of(kind, seed=6).batch(0)) != straight[0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("one text", "af9fee0d053e5292"),
        ("documents", "82eb8a6aa0e0e8c4"),
        ("masked", "00ec1cb54e233498"),
        ("masked pairs", "15d4f7841570a85b"),
        ("sentence pairs", "6242fe4f8679f598"),
    ],
)
def test_the_batches_of_a_seed_are_the_same_in_every_version(kind, expected):
    """A change of these numbers would make every interrupted run go on with other batches."""
    batches = batches_of(kind)
    steps = range(2 * batches.steps_per_epoch)
    found = hashlib.sha256("".join(digest(batches.batch(step)) for step in steps).encode())
    assert found.hexdigest()[:16] == expected


OTHER_SHAPES = [{"batch_size": 16}, {"seq_len": 8}, {"seed": 4}]
OTHER_MASKS = [
    *OTHER_SHAPES,
    {"vocab_size": VOCAB_SIZE + 1},
    {"mask_prob": 0.2},
    {"special": SPECIAL._replace(unk=None)},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "one text": [*OTHER_SHAPES, {"isolate_documents": True}],
    "documents": [*OTHER_SHAPES, {"isolate_documents": False}],
    "masked": [*OTHER_MASKS, {"next_sentence": True}],
    "masked pairs": [*OTHER_MASKS, {"next_sentence": False}],
    "sentence pairs": [{"seed": 6}, {"batch_tokens": 256}, {"buckets": 1}, {"max_len": 17}],
}


@every_kind
def test_the_fingerprint_changes_with_all_that_changes_batches(kind):
    other = sentences(1, 60) if kind == "sentence pairs" else documents((4, 1, *LENGTHS[2:]))
    changes = [{}, *CHANGES[kind], {"text": other}]
    prints = [batches_of(kind, **change).fingerprint for change in changes]
    assert len(set(prints)) == len(changes)
    assert batches_of(kind).fingerprint == prints[0]


# Rows


def of_host(host: int, hosts: int) -> Callable[[int], np.ndarray]:
    return lambda count: np.arange(count).reshape(hosts, -1)[host]


@every_kind
@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_the_rows_of_all_hosts_together_are_the_batch_to_the_byte(kind, hosts):
    batches = batches_of(kind)
    assert batches.steps_per_epoch >= 2
    for step in range(2 * batches.steps_per_epoch):  # partly filled batches are among them
        whole = batches.batch(step)
        parts = [batches.batch(step, of_host(host, hosts)) for host in range(hosts)]
        for name, leaf in whole._asdict().items():
            pieces = [getattr(part, name) for part in parts]
            if leaf is None:
                assert pieces == [None] * hosts
            else:
                assert all(piece.dtype == leaf.dtype for piece in pieces)
                assert all(len(piece) == len(leaf) // hosts for piece in pieces)
                assert np.concatenate(pieces).tobytes() == leaf.tobytes(), (name, step)


@pytest.mark.parametrize("kind", ["one text", "masked"])
def test_a_host_reads_no_text_of_rows_that_are_not_its_own(kind):
    tokens = Watched(documents().ids, documents().offsets)
    batches = batches_of(kind, tokens)
    tokens.read.clear()
    found = batches.batch(0, of_host(1, 4)).tokens
    assert 0 < len(tokens.read - {0}) <= found.size


@every_kind
def test_any_ascending_rows_may_be_wanted(kind):
    whole, some = batches_of(kind).batch(1), np.array([1, 4, 5, 7])
    part = batches_of(kind).batch(1, lambda count: some)
    assert np.array_equal(part.example_ids, some)
    for leaf, piece in zip(whole, part, strict=True):
        assert leaf is None and piece is None or np.array_equal(leaf[some], piece)


@every_kind
@pytest.mark.parametrize("rows", [[3, 1], [1, 1], [-1, 2], [2, 10**6]])
def test_rows_that_a_batch_does_not_have_are_refused(kind, rows):
    with pytest.raises(ConfigError, match="rows of a batch of "):
        batches_of(kind).batch(0, lambda count: np.array(rows))


def test_a_process_gives_the_rows_of_the_parts_that_its_devices_hold():
    devices = single()
    assert devices.local_rows(5).tolist() == [0, 1, 2, 3, 4]
    devices.num_shards, devices.local_shards = 4, (1, 3)
    assert devices.local_rows(12).tolist() == [3, 4, 5, 9, 10, 11]
    with pytest.raises(ConfigError, match="4 shards"):
        devices.local_rows(6)


# Refusals


@every_kind
def test_a_step_before_the_first_is_refused(kind):
    with pytest.raises(ConfigError, match="step=-1"):
        batches_of(kind).batch(-1)


@every_kind
def test_ids_outside_the_vocabulary_of_a_damaged_file_are_refused(kind, tmp_path: Path):
    path = tmp_path / "a.tokens"
    data.write_tokens(path, text_of(kind), vocab_size=VOCAB_SIZE)
    content = bytearray(path.read_bytes())
    content[64:66] = VOCAB_SIZE.to_bytes(2, "little")
    path.write_bytes(content)
    batches = batches_of(kind, data.open_tokens(path))
    with pytest.raises(DataError, match="id 131 "):
        [batches.batch(step) for step in range(batches.steps_per_epoch)]


SMALL = documents((7,))


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("one text", {"batch_size": 0}, ConfigError, "batch_size=0"),
        ("one text", {"seq_len": 0}, ConfigError, "seq_len=0"),
        ("one text", {"seed": -1}, ConfigError, "seed=-1"),
        ("one text", {"text": SMALL}, DataError, "7 ids"),
        ("masked", {"batch_size": 0}, ConfigError, "batch_size=0"),
        ("masked", {"seq_len": 2}, ConfigError, "at least 3 .bos, a token, eos., got 2"),
        ("masked pairs", {"seq_len": 4}, ConfigError, "at least 5 .bos, A, eos, B, eos., got 4"),
        ("masked", {"seed": 1 << 32}, ConfigError, "seed=4294967296, but"),
        ("masked", {"mask_prob": 0.0}, ConfigError, "mask_prob"),
        ("masked", {"mask_prob": 1.0}, ConfigError, "mask_prob"),
        ("masked", {"vocab_size": 5}, ConfigError, "vocab_size"),
        ("masked", {"text": documents(())}, DataError, "a corpus of 0 ids .* 1 are needed"),
        ("masked pairs", {"text": documents((7, 0))}, DataError, "needs two documents"),
        ("masked", {"special": SPECIAL._replace(mask=None)}, DataError, "need a mask token"),
        ("masked", {"special": SPECIAL._replace(bos=None)}, DataError, "need a bos token"),
        ("masked", {"special": SPECIAL._replace(eos=None)}, DataError, "need a eos token"),
        ("sentence pairs", {"seed": -1}, ConfigError, "seed=-1"),
        ("sentence pairs", {"seed": 1 << 32}, ConfigError, "seed=4294967296, but"),
        ("sentence pairs", {"batch_tokens": 0}, ConfigError, "batch_tokens=0"),
        ("sentence pairs", {"buckets": 0}, ConfigError, "buckets=0"),
        ("sentence pairs", {"pad_to_multiple": 0}, ConfigError, "pad_to_multiple=0"),
        ("sentence pairs", {"batch_size_multiple": 0}, ConfigError, "batch_size_multiple=0, but"),
    ],
)
def test_impossible_settings_and_texts_are_refused(kind, changes, error, message):
    with pytest.raises(error, match=message):
        batches_of(kind, **changes)


def test_masked_rows_refuse_ids_outside_their_own_vocabulary():
    masked = batches_of("masked", vocab_size=96)
    with pytest.raises(DataError, match="0 to 95"):
        [masked.batch(step) for step in range(masked.steps_per_epoch)]
