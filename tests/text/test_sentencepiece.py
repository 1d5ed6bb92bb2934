"""Model files of SentencePiece as tokenizers: what is read of them, and what is refused."""

import json
import sys

import pytest

from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import SpecialTokens

pytest.importorskip("tokenizers", reason="needs the extra experiments")
library = pytest.importorskip(
    "sentencepiece.sentencepiece_model_pb2", reason="needs the extra subwords"
)
NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED = 1, 2, 3, 4, 5
WORDS = {"▁": -2.0, "▁a": -3.0, "b": -4.0, "▁ab": -4.5, "c": -5.0, "bc": -4.2, "abc": -9.0, "a": -6}
PIECES = {
    "<unk>": (0.0, UNKNOWN),
    "<s>": (0.0, CONTROL),
    "</s>": (0.0, CONTROL),
    **{piece: (score, NORMAL) for piece, score in WORDS.items()},
    "«x»": (0.0, DEFINED),
}


def model(pieces=None, kind=1, **normalizer):
    """A model file of `pieces` {name: (score, type)}, by default `PIECES`."""
    made = library.ModelProto()
    for name, (score, of) in (pieces or PIECES).items():
        made.pieces.add(piece=name, score=score, type=of)
    made.trainer_spec.model_type = kind
    made.normalizer_spec.MergeFrom(library.NormalizerSpec(**normalizer))
    return made


@pytest.fixture
def t5(tmp_path):
    """Writes a model file and loads it."""

    def write(made):
        (tmp_path / "spiece.model").write_bytes(made.SerializeToString())
        (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 0}')
        return tokenizers.load(tmp_path)

    return write


def test_what_was_read_is_saved_as_json(t5, tmp_path):
    tokenizer = t5(model())
    tokenizer.save(tmp_path / "other.json")
    again = tokenizers.load(tmp_path / "other.json")
    texts = ["abc c", " b d«x»", "</s>"]
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert again.special == tokenizer.special


def test_t5s_gaps_follow_its_pieces_the_last_first(tmp_path):
    (tmp_path / "spiece.model").write_bytes(model().SerializeToString())
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer.vocab_size == len(PIECES) + 100
    assert tokenizer.id_of("<extra_id_99>") == len(PIECES)
    said = tmp_path / "tokenizer_config.json"
    said.write_text('{"extra_ids": 2}')
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer.decode([5, len(PIECES), len(PIECES) + 1]) == "b"
    for wrong in ("-1", "true", '"2"'):
        said.write_text(f'{{"extra_ids": {wrong}}}')
        with pytest.raises(DataError, match="extra_ids "):
            tokenizers.load(tmp_path)


@pytest.fixture
def marian(tmp_path):
    """A folder whose target has the pieces "▁é" and "é", and whose source lacks the piece "bc"."""
    target = {name: PIECES[name] for name in ("<unk>", "</s>", "▁", "▁a")}
    target |= {"a": (-6.0, NORMAL), "é": (-3.0, NORMAL), "▁é": (-4.0, NORMAL)}
    for side, pieces in (("source", PIECES), ("target", target)):
        (tmp_path / f"{side}.spm").write_bytes(model(pieces).SerializeToString())
    names = ["</s>", "<unk>", "▁", "▁a", "b", "c", "▁ab", "é", "▁é", ">>fra<<", "a", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    return tmp_path


def test_marians_sides_share_their_ids_and_each_has_pieces_of_its_own(marian):
    source, target = tokenizers.load_pair(marian)
    assert source.special == target.special == SpecialTokens(pad=11, eos=0, unk=1)
    assert target.encode("a é") == [3, 8]
    assert source.encode("a é b") == [3, 2, 7, 2, 4]  # the unknown "é" is the target's
    assert source.encode("éé") == [2, 1]
    assert source.encode(">>fra<< abc") == [9, 6, 5]
    assert source.decode([8, 3, 7, 0, 11]) == target.decode([8, 3, 7, 0, 11]) == "é aé"


def test_a_target_with_ids_of_its_own_is_read_by_them(marian):
    names = ["<pad>", "<unk>", "é", "▁é", "</s>", "▁a", "▁", "a"]
    (marian / "target_vocab.json").write_text(json.dumps({x: i for i, x in enumerate(names)}))
    assert tokenizers.load_pair(marian)[1].encode("é") == [8]
    (marian / "tokenizer_config.json").write_text('{"separate_vocabs": true}')
    assert tokenizers.load_pair(marian)[1].encode("é") == [3]
    assert tokenizers.load(marian).encode("ab") == [6]


def test_one_tokenizer_is_that_of_the_target_too(t5, marian):
    source = tokenizers.load(marian)
    t5(model())  # a further file, which does not count
    assert tokenizers.load(marian).fingerprint == source.fingerprint
    assert tokenizers.load_pair(marian)[1].fingerprint != source.fingerprint
    source.save(marian / "tokenizer.json")
    assert tokenizers.load_pair(marian)[1].fingerprint == source.fingerprint
    for name in ("tokenizer.json", "source.spm", "target.spm"):
        (marian / name).unlink()
    single = tokenizers.load(marian)
    assert tokenizers.load_pair(marian)[1].fingerprint == single.fingerprint


def test_a_vocabulary_without_the_unknown_is_refused(marian):
    (marian / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(DataError, match="source.spm: .*'<unk>'"):
        tokenizers.load(marian)


def test_a_file_that_is_no_unigram_model_is_refused(t5, tmp_path):
    behind = model()
    behind.trainer_spec.treat_whitespace_as_suffix = True
    for made, message in (
        (model(PIECES | {"<oov>": (0.0, UNKNOWN)}), "2 unknown pieces instead of 1"),
        (model(PIECES | {"e": (0.0, UNUSED)}), "unused pieces"),
        (model(kind=2), "another model_type than unigram; give the folder a tokenizer.json"),
        (model(escape_whitespaces=False), "no escape_whitespaces"),
        (model(precompiled_charsmap=b"odd"), "Cannot parse precompiled_charsmap"),
        (behind, "it has treat_whitespace_as_suffix"),
    ):
        with pytest.raises(DataError, match=message):
            t5(made)
    (tmp_path / "spiece.model").write_bytes(b"\xff" * 9)
    with pytest.raises(DataError, match="spiece.model: "):
        tokenizers.load(tmp_path)


class Absent:
    """Finds everything but SentencePiece."""

    def find_spec(self, name, path=None, target=None):
        if name == "sentencepiece":
            raise ModuleNotFoundError(name=name)


def test_without_sentencepiece_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "spiece.model").write_bytes(b"")
    for name in ("sentencepiece.sentencepiece_model_pb2", "sentencepiece"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(
        optional_dependencies.MissingExtra,
        match="protobuf sentencepiece",
    ):
        tokenizers.load(tmp_path)
