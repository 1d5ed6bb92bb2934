"""Tokenizers with special tokens that other programs add."""

from jaxformer.text.tokenizers import (
    Tokenizer,
    train_bpe,
    train_characters,
    with_template,
)

TEXT = ["ein Haus steht am Fluss", "die Sonne scheint <pad> hell"]


def test_other_programs_read_the_special_tokens_and_encode_does_not():
    tokenizer = train_bpe(TEXT, 277)
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
