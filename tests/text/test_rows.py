"""Each host builds its own rows of a batch, and together they are the batch, to the byte."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.text import data
from jaxformer.text.data import MaskedStream, Stream, Tokens
from jaxformer.text.tokenizers import SpecialTokens

LENGTHS = (5, 0, 1, 17, 2, 0, 31, 3, 13, 1, 29)
SPECIAL = SpecialTokens(pad=0, bos=1, eos=2, unk=3, mask=4)


class Watched(Tokens):
    """Tokens that note which places of them are read."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        super().__init__(ids, offsets)
        self.read: set[int] = set()

    def take(self, places: np.ndarray) -> np.ndarray:
        self.read.update(np.unique(places).tolist())
        return super().take(places)


def documents() -> Tokens:
    return Tokens(np.arange(5, 5 + sum(LENGTHS), dtype=np.uint32), np.cumsum([0, *LENGTHS]))


def sentences(seed: int) -> Tokens:
    rng = np.random.default_rng(seed)
    return Tokens.from_lists([rng.integers(5, 97, n).tolist() for n in rng.integers(1, 23, 61)])


def masked(tokens: Tokens, *, pairs: bool) -> MaskedStream:
    sizes = {"batch_size": 8, "seq_len": 7, "seed": 3, "vocab_size": 131}
    return MaskedStream(tokens, special=SPECIAL, next_sentence=pairs, **sizes)


STREAMS = {
    "one text": partial(Stream, batch_size=8, seq_len=7, seed=3, isolate_documents=False),
    "documents": partial(Stream, batch_size=8, seq_len=7, seed=3, isolate_documents=True),
    "masked": partial(masked, pairs=False),
    "masked pairs": partial(masked, pairs=True),
}


def batches_of(kind: str) -> Any:
    if kind in STREAMS:
        return STREAMS[kind](documents())
    sizes = {
        "batch_tokens": 128,
        "buckets": 3,
        "max_len": 31,
        "pad_to_multiple": 4,
        "batch_size_multiple": 8,
    }
    return data.bucket_pairs(sentences(1), sentences(2), seed=5, **sizes)


def of_host(host: int, hosts: int) -> Callable[[int], np.ndarray]:
    return lambda count: np.arange(count).reshape(hosts, -1)[host]


@pytest.mark.parametrize("kind", [*STREAMS, "sentence pairs"])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
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
    batches = STREAMS[kind](tokens)
    tokens.read.clear()
    found = batches.batch(0, of_host(1, 4)).tokens
    assert 0 < len(tokens.read - {0}) <= found.size


def test_any_ascending_rows_may_be_wanted():
    for kind in [*STREAMS, "sentence pairs"]:
        whole, some = batches_of(kind).batch(1), np.array([1, 4, 5, 7])
        part = batches_of(kind).batch(1, lambda count, some=some: some)
        assert np.array_equal(part.example_ids, some)
        for leaf, piece in zip(whole, part, strict=True):
            assert leaf is None and piece is None or np.array_equal(leaf[some], piece)


@pytest.mark.parametrize("rows", [[3, 1], [1, 1], [-1, 2], [2, 8]])
@pytest.mark.parametrize("kind", ["one text", "masked"])
def test_rows_that_a_batch_does_not_have_are_refused(kind, rows):
    with pytest.raises(ConfigError, match="rows of a batch of 8 must be ascending numbers 0 to 7"):
        batches_of(kind).batch(0, lambda count: np.array(rows))


def test_rows_that_a_batch_of_pairs_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="rows of a batch of .* must be ascending numbers"):
        batches_of("sentence pairs").batch(0, lambda count: np.array([count]))


def test_a_process_gives_the_rows_of_the_parts_that_its_devices_hold():
    devices = single()
    assert devices.local_rows(5).tolist() == [0, 1, 2, 3, 4]
    devices.num_shards, devices.local_shards = 4, (1, 3)
    assert devices.local_rows(12).tolist() == [3, 4, 5, 9, 10, 11]
    with pytest.raises(ConfigError, match="a batch has 6 rows, but 4 shards need a multiple of 4"):
        devices.local_rows(6)
