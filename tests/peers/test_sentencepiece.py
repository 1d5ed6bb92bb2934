"""Model files of SentencePiece cut and join texts as it does itself, and as `transformers` does."""

import json

import numpy as np
import pytest

from experiments.translation.grammar import sample_pair
from jaxformer.text import tokenizers

pytestmark = pytest.mark.peer
LETTERS = "abc éßÀ字かカ²¼½…“\u200b\u3000\u00a0\u00ad\t.,=-🙂₣"
PADDED = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
BYTES = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    return [sample_pair(rng) for _ in range(200)]


@pytest.fixture(scope="module")
def texts(pairs, odd_texts):
    """Lines of both languages, of odd characters, and of none."""
    rng = np.random.default_rng(1)
    random = ["".join(rng.choice([*LETTERS], rng.integers(1, 30))) for _ in range(150)]
    return [*(side for pair in pairs[:75] for side in pair), *random, *odd_texts]


@pytest.fixture(scope="module")
def processor():
    library = pytest.importorskip("sentencepiece", reason="the peer tests need sentencepiece")
    return lambda path: library.SentencePieceProcessor(model_file=str(path))


@pytest.fixture
def folder(train_pieces, pairs, tmp_path):
    """A folder with one model file of the English side."""

    def make(name, **options):
        lines = [pair.source for pair in pairs]
        model = train_pieces(lines, character_coverage=0.995, **options)
        (tmp_path / name).write_bytes(model)
        return tmp_path

    return make


def test_t5s_model_file_reads_and_writes_as_theirs(folder, processor, texts, transformers):
    path = folder("spiece.model", vocab_size=211, **PADDED)
    ours, theirs = tokenizers.load(path), processor(path / "spiece.model")
    ids = theirs.encode(texts)
    assert ours.encode_batch(texts) == ids
    assert sum(2 in row for row in ids) > 99
    known = [[i for i in row if i != 2] for row in ids]
    assert ours.decode_batch(ids) == [theirs.decode(row) for row in known]
    fast = transformers.T5Tokenizer.from_pretrained(path)
    assert [fast.encode(text, add_special_tokens=False) for text in texts] == ids
    assert fast.convert_tokens_to_ids("<extra_id_0>") == ours.id_of("<extra_id_0>")
    assert len(fast) == ours.vocab_size


@pytest.mark.parametrize("prefix", [True, False])
def test_a_model_file_of_bytes_reads_and_writes_as_theirs(folder, processor, texts, prefix):
    path = folder("spiece.model", vocab_size=431, add_dummy_prefix=prefix, **BYTES)
    ours, theirs = tokenizers.load(path), processor(path / "spiece.model")
    ids = theirs.encode(texts)
    assert ours.encode_batch(texts) == ids
    assert ours.decode_batch(ids) == theirs.decode(ids)
    assert sum(any(3 <= i < 259 for i in row) for row in ids) > 99


def test_marians_model_files_read_and_write_as_theirs(
    train_pieces, processor, pairs, texts, transformers, tmp_path
):
    """Pieces of both sides share their ids, with those of a language and of a pad."""
    names = ["</s>", "<unk>"]
    for side in ("source", "target"):
        lines = [getattr(pair, side) for pair in pairs] + ["字 か カ é ﬁ Ⅳ"] * (side == "target")
        model = train_pieces(lines, vocab_size=180, character_coverage=0.999)
        (tmp_path / f"{side}.spm").write_bytes(model)
        found = processor(tmp_path / f"{side}.spm")
        names += [found.id_to_piece(i) for i in range(3, found.get_piece_size())]
    names = [*dict.fromkeys(names), ">>fra<<", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    files = (str(tmp_path / name) for name in ("source.spm", "target.spm", "vocab.json"))
    theirs = transformers.MarianTokenizer(*files)
    source, target = tokenizers.load_pair(tmp_path)
    assert (source.special.eos, source.special.unk) == (0, 1)
    assert source.special.pad == len(names) - 1 == source.vocab_size - 1

    texts = [*texts, ">>fra<< The dog", ">>fra<<dog", "ⅣaﬁⅣ.", "ﬁ Ⅳ"]
    sources = theirs(texts, add_special_tokens=False).input_ids
    targets = theirs(text_target=texts, add_special_tokens=False).input_ids
    assert source.encode_batch(texts) == sources
    assert target.encode_batch(texts) == targets
    assert sources != targets
    for ids in (sources, targets):
        decoded = [theirs.decode(row, skip_special_tokens=True) for row in ids]
        assert [text.strip() for text in source.decode_batch(ids)] == decoded
        assert target.decode_batch(ids) == source.decode_batch(ids)
