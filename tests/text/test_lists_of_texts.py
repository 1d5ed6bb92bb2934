"""What is taken for several texts, and what is refused because it would give other strings."""

import numpy as np
import pytest

from jaxformer.errors import DataError
from jaxformer.text import data, metrics
from jaxformer.text.tokenizers import Tokenizer, train_bpe, train_characters, train_words

pandas = pytest.importorskip("pandas", reason="comes with datasets, in the extra data")

pytestmark = pytest.mark.usefixtures("misuse")

TEXTS = ["a b", "b c d"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["a b c d"], 269)


@pytest.fixture
def readers(tokenizer, tmp_path) -> dict:
    """What reads several texts, by a name."""
    path = tmp_path / "a.tokens"
    return {
        "encode_batch": tokenizer.encode_batch,
        "encode_inputs": tokenizer.encode_inputs,
        "encode_with_special": tokenizer.encode_with_special,
        "train_bpe": lambda texts: train_bpe(texts, 269),
        "train_words": lambda texts: train_words(texts, 11),
        "train_characters": train_characters,
        "hypotheses": lambda texts: metrics.exact_match(texts, TEXTS),
        "references": lambda texts: metrics.exact_match(TEXTS, texts),
        "documents": lambda texts: data.encode_documents(
            texts, tokenizer, path, isolate_documents=True
        ),
        "source": lambda texts: data.encode_pairs(texts, TEXTS, tokenizer, tmp_path),
        "target": lambda texts: data.encode_pairs(TEXTS, texts, tokenizer, tmp_path),
    }


NAMES = [
    *("encode_batch", "encode_inputs", "encode_with_special", "train_bpe", "train_words"),
    *("train_characters", "hypotheses", "references", "documents", "source", "target"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_refused_with_its_columns_and_one_column_is_read(readers, name):
    table = pandas.DataFrame({"review": TEXTS, "label": ["x", "y"]})
    with pytest.raises(DataError, match="DataFrame.* review, label"):
        readers[name](table)
    readers[name](table["review"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a b", "are one string"),
        (b"a b", "are of the type bytes"),
        ({"a b": 1}, "are of the type dict"),
        ({"a b"}, "are of the type set"),
        (np.array("a b"), "are an array without dimensions"),
        (7, "are of the type int"),
    ],
)
def test_what_gives_no_texts_in_order_is_refused(readers, name, texts, message):
    with pytest.raises(DataError, match=message):
        readers[name](texts)


@pytest.mark.parametrize("name", NAMES)
def test_lists_tuples_and_arrays_of_texts_are_read(readers, name):
    for texts in (TEXTS, tuple(TEXTS), np.array(TEXTS)):
        readers[name](texts)
