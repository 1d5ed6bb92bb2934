"""The characters of nanoGPT's shakespeare_char: its meta.pkl as a tokenizer."""

import pickle
from pathlib import Path
from typing import Any

from jaxformer.errors import DataError
from jaxformer.text.tokenizers import Tokenizer, train_characters


class _PlainValues(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; a pickle that would run code is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_characters(path: Path) -> Tokenizer:
    """The tokenizer of the characters in the file `path`, nanoGPT's meta.pkl.

    Nothing in the file is run. Raises `DataError` for another file, and for characters whose ids
    are not in their order.
    """
    try:
        with open(path, "rb") as file:
            characters = _PlainValues(file).load()["stoi"]
        ordered = sorted(characters)
        tokenizer = train_characters(ordered, special_tokens=())
        is_same = [characters[x] for x in ordered] == [tokenizer.id_of(x) for x in ordered]
    except OSError as error:
        raise DataError(f"{path}: cannot read the file: {error.strerror or error}") from error
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no meta.pkl of nanoGPT: {error}") from error
    if not is_same:
        raise DataError(f"{path}: the ids of the characters are not in the order of their codes")
    return tokenizer
