"""Tokenizers with other ids, and with special tokens that other programs add."""

import pytest

from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import (
    Tokenizer,
    load,
    renumber,
    train_bpe,
    train_characters,
    train_words,
    with_template,
)

TEXT = ["ein Haus steht am Fluss", "die Sonne scheint <pad> hell"]
TOKENIZERS = {
    "bpe": train_bpe(TEXT, 277),
    "words": train_words(TEXT, 13),
    "characters": train_characters(TEXT),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_renumbered_tokenizer_gives_the_same_tokens_and_text_by_other_ids(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    order = [2, 3, *range(4, tokenizer.vocab_size), 0]
    renumber(tokenizer, order).save(tmp_path / "tokenizer.json")
    found = load(tmp_path / "tokenizer.json")
    assert found.special[:4] == (len(order) - 1, None, 0, 1)
    assert found.vocab_size == len(order) == tokenizer.vocab_size - 1
    for ids, expected in zip(*(x.encode_batch(TEXT) for x in (found, tokenizer)), strict=True):
        assert [order[i] for i in ids] == expected
        assert found.decode(ids) == tokenizer.decode(expected)


def test_a_token_that_is_not_special_is_never_left_out():
    with pytest.raises(ConfigError, match="no id of .*only special tokens may be left out"):
        renumber(TOKENIZERS["words"], [0, 1, 2, 3, 4])


def test_other_programs_read_the_special_tokens_and_encode_does_not():
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer.encode(TEXT[0])
    for sides, expected in (
        ({"eos": True}, [*ids, 2]),
        ({"bos": True, "eos": True}, [1, *ids, 2]),
        ({}, ids),
    ):
        found = with_template(tokenizer, **sides)
        assert found.library_tokenizer.encode(TEXT[0]).ids == expected
        assert found.encode(TEXT[0]) == ids
    bare = with_template(train_characters(["abc"], special_tokens=()), bos=True, eos=True)
    assert isinstance(bare, Tokenizer) and bare.library_tokenizer.encode("ba").ids == [1, 0]
