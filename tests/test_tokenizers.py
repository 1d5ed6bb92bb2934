"""Text to ids and back."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import tokenizers
from jaxformer.config import ConfigError
from jaxformer.data import DataError
from jaxformer.tokenizers import EOS, PAD, UNK, Tokenizer, train_bpe, train_characters, train_words

LINES = [
    "Der kleine Hund läuft schnell .",
    "Ein Hund sieht das <pad> kleine Haus .",
    "das Haus sieht den Hund nicht",
    "<pad> <eos> <bos><unk>",
]
ODD = [
    "",
    " ",
    "   ",
    " a",
    "a ",
    "  zwei  Leerzeichen  ",
    "\ttab\t\t",
    "\n",
    "a\r\nb",
    "\u2028",
    "a\u2028b\x85c\x0bd\x0ce",
    "🙂👩‍👩‍👧",
    "e\u0301 é",
    "\x00",
    "\ufeff",
    "<pad><eos> <unk>",
    "Ġ Ċ ▁",
    "it's 1,000 they'll",
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(LINES * 7, 307)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_words(LINES, 101)


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return train_characters(LINES)


@pytest.mark.parametrize("text", ODD)
def test_bpe_decodes_odd_text_exactly(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=1000, deadline=None, database=None)
@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_bpe_decodes_every_text_exactly_and_never_gives_a_special_id(bpe, texts):
    batch = bpe.encode_batch(texts)
    assert bpe.decode_batch(batch) == texts
    assert batch == [bpe.encode(text) for text in texts]
    assert all(i > UNK for ids in batch for i in ids)


def test_a_first_word_is_the_same_token_as_elsewhere(bpe):
    assert bpe.encode("Hund") == bpe.encode("sieht Hund")[-1:]


def test_bpe_learns_the_size_asked_for_and_stops_early_where_the_text_ends(bpe):
    assert bpe.vocab_size == 307
    assert train_bpe(["ab"], 307).vocab_size == 262  # 260, "ab" and " ab"


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
def test_text_that_looks_like_a_special_token_is_ordinary_text(kind, request, tmp_path):
    made = request.getfixturevalue(kind)
    made.save(tmp_path / "tokenizer.json")
    for tokenizer in (made, tokenizers.load(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode("<pad> <eos>")
        assert min(ids) > EOS and tokenizer.decode(ids)
    assert made.decode(made.encode("<pad>")) == "<pad>"


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
def test_special_ids_decode_to_nothing(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("das Haus sieht")
    assert tokenizer.decode(np.array([1, *ids, 2, 0, 0])) == "das Haus sieht"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
def test_a_saved_tokenizer_loads_as_the_same(kind, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = tokenizers.load(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode_batch(LINES + ODD) == tokenizer.encode_batch(LINES + ODD)


def test_the_fingerprint_tells_tokenizers_apart_and_equal_text_gives_equal_ones(bpe):
    assert train_bpe(LINES * 7, 307).fingerprint == bpe.fingerprint
    assert train_bpe(LINES * 7, 306).fingerprint != bpe.fingerprint


@settings(max_examples=200, deadline=None, database=None)
@given(text=st.text(alphabet=sorted(set("".join(LINES)))))
def test_characters_decode_known_characters_exactly(characters, text):
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


def test_an_unknown_character_is_unk():
    tokenizer = train_characters(["ab", "b\n"])
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("bxx a") == [6, UNK, UNK, UNK, 5]
    assert tokenizer.encode("\nab") == [4, 5, 6]


def test_words_are_kept_by_frequency_and_joined_by_one_space():
    tokenizer = train_words(["a b b", "c b a"], 6)
    assert tokenizer.encode("b a c") == [4, 5, UNK]
    assert tokenizer.encode("  a\t\u2028b ") == [5, 4]
    assert tokenizer.decode([5, 4, UNK, 4]) == "a b b"


@settings(max_examples=200, deadline=None, database=None)
@given(sentence=st.lists(st.sampled_from(" ".join(LINES).split())).map(" ".join))
def test_words_decode_a_sentence_of_known_words_exactly(words, sentence):
    assert words.decode(words.encode(sentence)) == sentence


@pytest.mark.parametrize("bad", ["ein \ud800 Wort", None])
def test_what_is_not_text_is_refused_with_its_number(bpe, bad):
    reason = "surrogate" if bad else "must be str, got NoneType"
    with pytest.raises(DataError, match=f"text 2 of 3: .*{reason}"):
        bpe.encode_batch(["gut", bad, "gut"])
    for train in (lambda lines: train_bpe(lines, 300), train_characters):
        with pytest.raises(DataError, match=f"line 2 of the training text: .*{reason}"):
            train(["gut", bad, "gut"])


@pytest.mark.parametrize("bad", [-1, 307])
def test_ids_of_no_token_are_refused(bpe, bad):
    with pytest.raises(DataError, match="ids must be 0 to 306, got"):
        bpe.decode_batch([[5], [7, bad]])


@pytest.mark.parametrize("lines", [[], ["", " \t"]])
def test_training_needs_text(lines):
    for train in (lambda x: train_bpe(x, 300), lambda x: train_words(x, 30), train_characters):
        with pytest.raises(DataError, match="needs text"):
            train(lines)


def test_a_vocabulary_too_small_is_refused():
    with pytest.raises(ConfigError, match="vocab_size must be at least 260 .* got 259"):
        train_bpe(LINES, 259)
    with pytest.raises(ConfigError, match="vocab_size must be at least 5 .* got 4"):
        train_words(LINES, 4)


@pytest.mark.parametrize("damage", ["absent", "cut", "folder", "not UTF-8", "other JSON"])
def test_a_damaged_file_is_refused_by_name(bpe, tmp_path, damage):
    path = tmp_path / "tokenizer.json"
    bpe.save(path)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "absent":
        other = {"cut": content[: len(content) // 2], "not UTF-8": b"\xff" + content}
        path.write_bytes(other.get(damage, b'{"a": 1}'))
    with pytest.raises(DataError, match="tokenizer.json: "):
        tokenizers.load(path)


def test_a_tokenizer_without_our_special_tokens_is_refused(tmp_path):
    other = library.Tokenizer(library.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(DataError, match="other.json: ids 0 to 3 must be the special tokens"):
        tokenizers.load(tmp_path / "other.json")


def test_special_tokens_that_would_be_shown_are_refused(bpe, tmp_path):
    bpe.save(tmp_path / "shown.json")
    facts = json.loads((tmp_path / "shown.json").read_text())
    facts["added_tokens"][EOS]["special"] = False
    (tmp_path / "shown.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="ids 0 to 3 must be the special tokens"):
        tokenizers.load(tmp_path / "shown.json")


def test_cutting_padding_and_framing_set_in_a_file_do_not_change_sentences(bpe, tmp_path):
    bpe.save(tmp_path / "cutting.json")
    cutting = library.Tokenizer.from_file(str(tmp_path / "cutting.json"))
    cutting.enable_truncation(2)
    cutting.enable_padding(pad_id=PAD, pad_token="<pad>", length=17)
    cutting.post_processor = library.processors.TemplateProcessing(
        "<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    cutting.save(str(tmp_path / "cutting.json"))
    assert tokenizers.load(tmp_path / "cutting.json").encode(LINES[0]) == bpe.encode(LINES[0])


def test_the_text_modules_load_neither_jax_nor_an_extra():
    names = ["jax", "tokenizers", "sacrebleu", "sacremoses"]
    code = (
        "import sys, jaxformer.tokenizers, jaxformer.data, jaxformer.metrics\n"
        f"print(' '.join(name for name in {names} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
