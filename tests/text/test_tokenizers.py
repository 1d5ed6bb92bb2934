"""Text to ids and back."""

import json
import re
import time
import warnings

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError, DataError
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import (
    EOS,
    MASKED_SPECIAL_TOKENS,
    PAD,
    UNK,
    SpecialTokens,
    Tokenizer,
    train_bpe,
    train_characters,
    train_words,
)
from tests.text.examples import examples

LINES = [
    "Der kleine Hund läuft schnell .",
    "Ein Hund sieht das <pad> kleine Haus .",
    "das Haus sieht den Hund nicht",
    "<pad> <eos> <bos><unk>",
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(LINES * 7, 307)


@pytest.fixture(scope="module")
def bare() -> Tokenizer:
    return train_bpe(["\n".join(LINES)] * 7, 311, prefix="", special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_words(LINES, 101)


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return train_characters(LINES)


@pytest.fixture(scope="module")
def odd(odd_texts) -> list[str]:
    """Odd texts, and those that not every tokenizer keeps."""
    return [*odd_texts, "a\u2028b\x85c\x0bd\x0ce", "<pad><eos> <unk>"]


@pytest.mark.parametrize("kind", ["bpe", "bare"])
def test_bpe_decodes_odd_text_exactly(kind, odd, request):
    tokenizer = request.getfixturevalue(kind)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in odd] == odd


@examples
@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_bpe_decodes_every_text_exactly_and_never_gives_a_special_id(bpe, bare, texts):
    for tokenizer in (bpe, bare):
        batch = tokenizer.encode_batch(texts)
        assert tokenizer.decode_batch(batch) == texts
        assert batch == [tokenizer.encode(text) for text in texts]
        special = set(tokenizer.special)
        assert not any(special.intersection(ids) for ids in batch)


@examples
@given(text=st.lists(st.sampled_from(["das", "Haus", "'s", "7", ".", " ", "\n", "é\u2028"])))
def test_without_a_prefix_a_text_has_the_ids_of_its_pieces(bare, text):
    text = "".join(text)
    pieces = re.split(r"(?<=\S\n)(?=\S)", text)
    assert [i for piece in pieces for i in bare.encode(piece)] == bare.encode(text)


def test_without_a_prefix_a_first_word_is_not_the_word_inside(bare):
    assert bare.encode("Hund") != bare.encode(" Hund") == bare.encode("den Hund")[-1:]


def test_a_first_word_is_the_same_token_as_elsewhere(bpe):
    assert bpe.encode("Hund") == bpe.encode("sieht Hund")[-1:]


@pytest.mark.parametrize("prefix", ["", " "])
def test_a_lower_case_tokenizer_reads_all_cases_as_lower_case(prefix):
    lower = train_bpe(LINES * 7, 307, prefix=prefix, lowercase=True)
    assert lower.encode("ÖL Der Hund") == lower.encode("öl der hund")
    assert lower.decode(lower.encode("ÖL Der Hund!")) == "öl der hund!"
    learned = "".join(lower.token(i) for i in range(260, lower.vocab_size)).replace("Ġ", "")
    assert len(learned) > 41 and not re.search("[A-Z]", learned)


@examples
@given(text=st.text("ΣσςΑάο' .-1\u0301\u00adא:’ǅ\n", max_size=13))
def test_lower_case_is_pythons_also_where_a_sigma_ends_a_word(text, greek):
    assert greek.decode(greek.encode(text)) == text.lower()


@pytest.fixture(scope="module")
def greek() -> Tokenizer:
    return train_bpe(["ΟΔΟΣ ΣΟΦΟΣ"], 260, prefix="", lowercase=True)


def test_bpe_learns_the_size_asked_for_and_stops_early_where_the_text_ends(bpe):
    assert bpe.vocab_size == 307
    assert train_bpe(["ab"], 307).vocab_size == 262  # 260, "ab" and " ab"


def test_a_text_without_spaces_is_learned_from_in_linear_time_and_it_is_said():
    letters = "".join(np.random.default_rng(3).choice(list("abcdefgh"), 300_007))
    began = time.process_time()
    with pytest.warns(UserWarning, match="1,000 characters") as said:
        tokenizer = train_bpe([letters, "a short line", letters], 1_009)
    assert time.process_time() - began < 12, "it took 20 times as long for three times the text"
    assert len(said) == 1 and tokenizer.vocab_size == 1_009
    assert tokenizer.decode(tokenizer.encode(letters)) == letters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_bpe(["word " * 1_003, "word," * 1_003, "a1" * 1_003], 300)


@pytest.mark.parametrize("kind", ["bpe", "bare", "words", "characters"])
def test_text_that_looks_like_a_special_token_is_ordinary_text(kind, request, tmp_path):
    made = request.getfixturevalue(kind)
    made.save(tmp_path / "tokenizer.json")
    for tokenizer in (made, tokenizers.load(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode("<pad> <eos>")
        assert min(ids) > EOS and tokenizer.decode(ids)
    assert made.decode(made.encode("<pad>")) == "<pad>"


def test_special_tokens_have_the_first_ids_and_are_found_by_their_names(bpe, bare):
    assert bpe.special == SpecialTokens(0, 1, 2, 3, None)
    assert bare.special == SpecialTokens(0, 1, 2, 3, 4)
    assert train_words(LINES, 101, special_tokens=MASKED_SPECIAL_TOKENS).special.mask == 4
    bert = train_characters(LINES, special_tokens=("[CLS]", "<own>", "[UNK]", "[PAD]"))
    assert bert.special == SpecialTokens(pad=3, bos=0, unk=2)
    assert bert.encode("\0") == [2]
    gpt = train_bpe(LINES, 257, prefix="", special_tokens=("<|endoftext|>",))
    assert gpt.special == SpecialTokens(bos=0, eos=0)


def test_a_token_and_its_id_name_each_other(bpe, bare):
    assert [bare.token(i) for i in range(5)] == list(MASKED_SPECIAL_TOKENS)
    assert bpe.token(bpe.id_of("ĠHund")) == "ĠHund"
    assert bpe.id_of("<mask>") is None
    for index in (-1, 307):
        with pytest.raises(DataError, match=f"id {index}, "):
            bpe.token(index)


@pytest.mark.parametrize("kind", ["bpe", "words", "characters"])
def test_special_ids_decode_to_nothing(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("das Haus sieht")
    assert tokenizer.decode(np.array([1, *ids, 2, 0, 0])) == "das Haus sieht"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", ["bpe", "bare", "words", "characters"])
def test_a_saved_tokenizer_loads_as_the_same(kind, odd, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = tokenizers.load(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.special == tokenizer.special
    assert loaded.encode_batch(LINES + odd) == tokenizer.encode_batch(LINES + odd)


def test_the_fingerprint_tells_tokenizers_apart_and_equal_text_gives_equal_ones(bpe):
    assert train_bpe(LINES * 7, 307).fingerprint == bpe.fingerprint
    assert train_bpe(LINES * 7, 306).fingerprint != bpe.fingerprint


@examples
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


def test_a_vocabulary_can_hold_only_the_characters():
    tokenizer = train_characters(["ab", "b\n"], special_tokens=())
    assert (tokenizer.vocab_size, tokenizer.special) == (3, SpecialTokens())
    assert tokenizer.encode("b\na") == [2, 0, 1]


def test_a_character_that_would_be_lost_is_refused():
    characters = train_characters(["ab", "b\n"], special_tokens=("<pad>",))
    with pytest.raises(DataError, match="UNK"):
        characters.encode_batch(["ab", "abxya", "b"])


def test_words_are_kept_by_frequency_and_joined_by_one_space():
    tokenizer = train_words(["a b b", "c b a"], 6)
    assert tokenizer.encode("b a c") == [4, 5, UNK]
    assert tokenizer.encode("  a\t\u2028b ") == [5, 4]
    assert tokenizer.decode([5, 4, UNK, 4]) == "a b b"


@examples
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
    with pytest.raises(DataError, match="0 to 306"):
        bpe.decode_batch([[5], [7, bad]])


@pytest.mark.parametrize("lines", [[], ["", " \t"]])
def test_training_needs_text(lines):
    for train in (lambda x: train_bpe(x, 300), lambda x: train_words(x, 30), train_characters):
        with pytest.raises(DataError, match="needs text"):
            train(lines)


NAMES = "a special token is written <name> or"
DIFFERENT = "special tokens must be a sequence of different names"


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (
            train_bpe,
            {"vocab_size": 259},
            r"at least 260 \(256 bytes and 4 special .*, got 259",
        ),
        (train_words, {"vocab_size": 4}, "vocab_size"),
        (train_words, {"vocab_size": 101, "special_tokens": ("<pad>",)}, "words need <unk> among"),
        (train_bpe, {"vocab_size": 307, "prefix": "▁"}, """prefix must be "" or " ", got '▁'"""),
        (train_bpe, {"vocab_size": 307, "special_tokens": ("<pad>", "pad")}, NAMES),
        (train_characters, {"special_tokens": "<pad>"}, DIFFERENT),
        (train_characters, {"special_tokens": ("<a>", "<b>", "<a>")}, DIFFERENT),
        *(
            (train_characters, {"special_tokens": ("<pad>", name)}, NAMES)
            for name in ("pad", "", "<>", "<_>", "<a b>", "a<b>", None)
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(train, options, message):
    with pytest.raises(ConfigError, match=message):
        train(LINES, **options)


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


def test_a_vocabulary_made_elsewhere_is_taken_but_not_as_our_own(tmp_path):
    other = library.Tokenizer(library.models.WordLevel({"<s>": 0, "a": 5, "?": 1}, unk_token="?"))
    other.add_special_tokens(["<s>"])
    other.save(str(tmp_path / "other.json"))
    tokenizer = tokenizers.load(tmp_path / "other.json")
    assert (tokenizer.special, tokenizer.vocab_size) == (SpecialTokens(bos=0), 6)
    refused = "ids 0 to 3 must be the special tokens <pad> <bos> <eos> <unk>, got .*pad=None"
    with pytest.raises(DataError, match=refused):
        tokenizers.require_standard_ids(tokenizer)


def test_one_bare_string_and_ids_that_are_no_integers_are_refused(bpe):
    for use in (bpe.encode_batch, lambda text: train_bpe(text, 300)):
        with pytest.raises(DataError, match="one string"):
            use("abc")
    for ids in ([5.7], b"ab", "ab", [[5]], [True]):
        with pytest.raises(DataError, match="ids"):
            bpe.decode(ids)
    assert bpe.decode_batch(iter([np.array([5, 6], np.uint16), []])) == [bpe.decode([5, 6]), ""]


def test_a_file_that_another_writer_began_does_not_disturb_the_writing(tmp_path):
    bpe = train_bpe(["a"], 260)
    (tmp_path / "bpe.json.unfinished").mkdir()
    bpe.save(tmp_path / "bpe.json")
    assert tokenizers.load(tmp_path / "bpe.json").fingerprint == bpe.fingerprint
    assert len([*tmp_path.iterdir()]) == 2


def test_special_tokens_that_would_be_shown_are_not_our_own(bpe, bare, tmp_path):
    assert (
        tokenizers.require_standard_ids(bpe) is bpe
        and tokenizers.require_standard_ids(bare) is bare
    )
    bpe.save(tmp_path / "shown.json")
    tokenizer = json.loads((tmp_path / "shown.json").read_text())
    tokenizer["added_tokens"][EOS]["special"] = False
    (tmp_path / "shown.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="special tokens"):
        tokenizers.require_standard_ids(tokenizers.load(tmp_path / "shown.json"))


def test_a_tokenizer_given_is_left_as_it_was():
    given = library.Tokenizer(library.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    given.pre_tokenizer = library.pre_tokenizers.Whitespace()
    given.enable_truncation(2)
    assert Tokenizer(given).encode("a a a") == [0, 0, 0]
    assert given.encode("a a a").ids == [0, 0]


def gpt2_files():
    """A vocabulary of all bytes and the merges "a b" and "Ġ ab", in the files that GPT-2 has."""
    bytes_ = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*bytes_, "ab", "Ġab", "<|endoftext|>"]
    return {
        "vocab.json": json.dumps({token: i for i, token in enumerate(tokens)}),
        "merges.txt": "#version: 0.2\na b\nĠ ab\n",
    }


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content.encode())


def with_odd_tokens():
    """A tokenizer with added tokens of every kind, before and after its vocabulary."""
    made = library.Tokenizer(library.models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    made.normalizer = library.normalizers.Lowercase()
    made.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = library.decoders.Metaspace()
    token = library.AddedToken
    made.add_special_tokens([token("[X]", lstrip=True), "<s>", token("<mask>", rstrip=True)])
    made.add_tokens([token("Ab", normalized=False, single_word=True), "ba"])
    made.add_special_tokens(["<extra_id_0>", "<s>b"])
    made.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return made


def test_a_tokenizer_for_the_library_is_equal_and_may_be_changed():
    given = with_odd_tokens()
    tokenizer = Tokenizer(given)
    made = tokenizer.to_library()
    assert made.to_str() == given.to_str() == tokenizer.library_tokenizer.to_str()
    text = "ab Ab ba abba [X]"
    before = tokenizer.encode(text)
    assert made.encode(text, add_special_tokens=False).ids == before
    made.add_tokens(["abb"])
    made.enable_truncation(1)
    assert tokenizer.encode(text) == before


def test_no_text_makes_a_copy_of_the_model(monkeypatch):
    tokenizer = Tokenizer(with_odd_tokens())
    kind = type(tokenizer.library_tokenizer.model)
    monkeypatch.setattr("copy.deepcopy", lambda _: pytest.fail("a copy"))
    monkeypatch.setattr("json.JSONDecoder", lambda: pytest.fail("the vocabulary as text"))
    ((ids, offsets),) = tokenizer.encode_with_special(["a<s>b [X]"])
    token = tokenizer.id_of
    assert ids == [token("a"), token("<s>b"), token("[X]")]
    assert offsets == [(0, 1), (1, 5), (5, 9)]
    (row,) = tokenizer.encode_inputs(["a<mask>"])
    assert row == [0, token("a"), token("<mask>")]
    assert isinstance(tokenizer.to_library().model, kind)


def test_the_first_and_longest_name_of_a_special_token_is_found():
    tokenizer = Tokenizer(with_odd_tokens())
    assert tokenizer.special_ids.keys() == {"[X]", "<s>", "<mask>", "<extra_id_0>", "<s>b"}
    assert tokenizer.find_special_name("Ab x <s>b [X]") == "<s>b"
    assert tokenizer.find_special_name("Ab [x] < s>") is None
    bare = Tokenizer(library.Tokenizer(library.models.BPE({"a": 0}, [])))
    assert bare.find_special_name("a") is None


def test_a_folder_like_gpt2s_is_read(tmp_path):
    write(tmp_path, gpt2_files())
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer.special == SpecialTokens(bos=258, eos=258)
    assert tokenizer.encode("ab ab") == [256, 257]
    assert tokenizer.decode([*tokenizer.encode("é ab<|endoftext|>"), 258]) == "é ab<|endoftext|>"
    write(tmp_path, {"tokenizer_config.json": '{"add_prefix_space": true}'})
    assert tokenizers.load(tmp_path).encode("ab ab") == [257, 257]


def test_gpt2s_merges_are_tried_in_the_order_of_the_file(tmp_path):
    tokens = ["Ġ", "a", "b", "c", "ab", "bc", "<unk>"]
    write(tmp_path, {"vocab.json": json.dumps({x: i for i, x in enumerate(tokens)})})
    for merges, ids in (("a b\nb c\n", [4, 3]), ("b c\r\na b\r\n", [1, 5])):
        write(tmp_path, {"merges.txt": merges})
        assert tokenizers.load(tmp_path).encode("abc") == ids
    assert tokenizers.load(tmp_path).encode("ax") == [1, 6]  # <unk>: nothing is lost


def gpt2_settings(**settings):
    """GPT-2's files, with settings in tokenizer_config.json."""
    return gpt2_files() | {"tokenizer_config.json": json.dumps(settings)}


REFUSED_FOLDERS = {
    "empty": ({}, "folder holds tokenizer.json, or source.spm and target"),
    "vocabulary without merges": ({"vocab.json": '{"a": 0}'}, "vocab.json and merges.txt"),
    "half a vocabulary": (gpt2_files() | {"vocab.json": '{"a": 0, "b'}, "vocab.json: .*JSON"),
    "list": (gpt2_files() | {"vocab.json": '["a"]'}, "vocab.json: .*list"),
    "gap in the ids": (gpt2_files() | {"vocab.json": '{"a": 0, "b": 2}'}, "vocab.json: .*2 tokens"),
    "half a merge": (gpt2_files() | {"merges.txt": "a b\nĠ a"}, "merges.txt: .*vocab.json"),
    "merges of others": (gpt2_files() | {"merges.txt": "a b\nc d\n"}, "merges.txt: .*vocab.json"),
    "half the settings": (
        gpt2_files() | {"tokenizer_config.json": "{"},
        "tokenizer_config.json: .*JSON",
    ),
    "space that its class ignores": (
        gpt2_settings(tokenizer_class="Qwen2Tokenizer", add_prefix_space=True),
        "add_prefix_space=true .*Qwen2Tokenizer",
    ),
    "word for a truth": (
        gpt2_settings(add_prefix_space="no"),
        "tokenizer_config.json: add_prefix_space .*'no'",
    ),
    "added token with another's id": (
        gpt2_files() | {"added_tokens.json": '{"<|im_end|>": 300}'},
        "'<.im_end.>' has the id 300",
    ),
    "word list without BERT's names": (
        {"vocab.txt": "[PAD]\n[UNK]\na\n"},
        "vocab.txt: .*sep_token",
    ),
    "tokenizer.model": ({"tokenizer.model": ""}, "a model file of SentencePiece"),
    "sentencepiece.bpe.model": ({"sentencepiece.bpe.model": ""}, "a model file of SentencePiece"),
}


@pytest.mark.parametrize(("files", "culprit"), REFUSED_FOLDERS.values(), ids=REFUSED_FOLDERS)
def test_a_folder_that_is_damaged_or_of_another_kind_is_refused_by_name(tmp_path, files, culprit):
    write(tmp_path, files)
    with pytest.raises(DataError, match=culprit):
        tokenizers.load(tmp_path)


WORDPIECE = "[PAD] [UNK] [CLS] [SEP] [MASK] a ##b École ecole c 字 [".split()


def test_a_folder_like_berts_is_read(tmp_path):
    write(tmp_path, {"vocab.txt": "".join(f"{word}\n" for word in WORDPIECE)})
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer.special == SpecialTokens(pad=0, bos=2, eos=3, unk=1, mask=4)
    assert tokenizer.encode("ABB  École\n字a") == [5, 6, 6, 8, 10, 5]
    assert tokenizer.encode("[MASK]") == [11, 1, 1]
    assert tokenizer.decode([2, 5, 6, 4, 10, 3]) == "ab 字"
    write(tmp_path, {"tokenizer_config.json": '{"do_lower_case": false, "strip_accents": null}'})
    assert tokenizers.load(tmp_path).encode("ab A École") == [5, 6, 1, 7]


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ({"tokenizer_class": "BertTokenizerFast"}, [5, 6, 5, 8]),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, [5, 6, 1, 7]),
        ({"tokenizer_class": "DistilBertTokenizer", "strip_accents": False}, [5, 6, 5, 1]),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, [5, 6, 5, 8]),
    ],
)
def test_letters_are_changed_as_berts_class_says_whatever_tokenizer_json_says(tmp_path, said, ids):
    """As in transformers (a peer test compares them)."""
    write(tmp_path, {"vocab.txt": "".join(f"{word}\n" for word in WORDPIECE)})
    tokenizers.load(tmp_path).save(tmp_path / "tokenizer.json")
    write(tmp_path, {"tokenizer_config.json": json.dumps(said)})
    assert tokenizers.load(tmp_path).encode("ab A École") == ids


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "RobertaTokenizerFast", "TokenizersBackend"])
def test_a_space_begins_a_text_as_gpt2s_class_says(tmp_path, kind):
    bpe = train_bpe(LINES * 7, 307, prefix="")
    bpe.save(tmp_path / "tokenizer.json")
    said = {"tokenizer_class": kind, "add_prefix_space": True}
    write(tmp_path, {"tokenizer_config.json": json.dumps(said)})
    begins = "" if kind == "TokenizersBackend" else " "
    assert tokenizers.load(tmp_path).encode("Hund") == bpe.encode(begins + "Hund")


def test_spaces_before_signs_leave_decoded_text_where_a_folder_asks_for_it(tmp_path, bpe):
    words = "[PAD] [UNK] [CLS] [SEP] a , n't ' s".split()
    write(tmp_path, {"vocab.txt": "".join(f"{word}\n" for word in words)})
    ids = [4, 5, 4, 6, 7, 4, 8]
    assert tokenizers.load(tmp_path).decode(ids) == "a, an't ' a s"
    said = json.dumps({"clean_up_tokenization_spaces": True})
    write(tmp_path, {"tokenizer_config.json": said})
    assert tokenizers.load(tmp_path).decode(ids) == "a, an't'a s"
    (tmp_path / "bpe").mkdir()
    bpe.save(tmp_path / "bpe" / "tokenizer.json")
    write(tmp_path / "bpe", {"tokenizer_config.json": said})
    assert tokenizers.load(tmp_path / "bpe").decode(bpe.encode("Hund .")) == "Hund ."


def test_berts_word_list_is_saved_with_the_frame_that_others_put_around_a_text(tmp_path):
    write(tmp_path, {"vocab.txt": "".join(f"{word}\n" for word in WORDPIECE)})
    tokenizers.load(tmp_path).save(tmp_path / "tokenizer.json")
    others = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert others.encode("ab").ids == [2, 5, 6, 3]
    pair = others.encode("ab", "a")
    assert (pair.ids, pair.type_ids) == ([2, 5, 6, 3, 5, 3], [0, 0, 0, 0, 1, 1])
    assert tokenizers.load(tmp_path).encode("ab") == [5, 6]


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


def test_roles_and_languages_that_a_folder_says_are_saved_beside_the_tokenizer(tmp_path):
    words = library.Tokenizer.from_str(train_words(["a rose"], 7).library_tokenizer.to_str())
    words.add_special_tokens(["deu_Latn", "eng_Latn"])
    words.save(str(tmp_path / "tokenizer.json"))
    said = {"eos_token": "<bos>", "bos_token": None, "tokenizer_class": "NllbTokenizer"}
    said |= {"pad_token": "<pad>", "unk_token": "<unk>", "tgt_lang": "deu_Latn"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    loaded = tokenizers.load(tmp_path)
    size = loaded.id_of("deu_Latn")
    assert (loaded.special.bos, loaded.special.eos) == (None, 1)
    assert loaded.encode_inputs(["a"], language="deu_Latn") == [[size, *loaded.encode("a"), 1]]
    assert loaded.encode_inputs([""]) == [[size + 1, 1]]
    loaded.save(tmp_path / "source.json")
    again = tokenizers.load(tmp_path / "source.json")
    assert (again.special, again.languages) == (loaded.special, loaded.languages)
    with pytest.raises(ConfigError, match="'deu' .*deu_Latn"):
        again.encode_inputs(["a"], language="deu")


def test_added_tokens_follow_the_vocabulary_with_their_ids(tmp_path, bpe):
    bpe.library_tokenizer.model.save(str(tmp_path))
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    said = {"eos_token": "<|im_end|>", "add_eos_token": True}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(said))
    loaded = tokenizers.load(tmp_path)
    assert loaded.special.eos == size
    assert loaded.encode_inputs(["a"]) == [[*loaded.encode("a"), size]]
