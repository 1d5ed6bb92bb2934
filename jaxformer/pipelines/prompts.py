"""The ids of prompts, which are texts or ids of tokens."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxformer.errors import DataError
from jaxformer.pipelines.inputs import Prompt
from jaxformer.text.tokenizers import Tokenizer


def prompt_ids(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt; `DataError` for what is neither a text nor ids of tokens."""
    prompts = list(prompts)
    texts = iter(tokenizer.encode_inputs([x for x in prompts if isinstance(x, str)]))
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str):
            encoded.append(next(texts))
        else:
            encoded.append(check_ids(f"prompt {number}", prompt, tokenizer))
    return encoded


def check_ids(name: str, value: Any, tokenizer: Tokenizer) -> list[int]:
    """The ids `value` in a list; `DataError`, with the `name`, for what is no ids of tokens."""
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of different lengths
        ids = np.empty(())
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"{name} is a {type(value).__name__}, but must be a string or a sequence of integer ids"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(
            f"{name} has ids from {ids.min()} to {ids.max()}, but ids are 0 to "
            f"{tokenizer.vocab_size - 1}"
        )
    return [int(index) for index in ids]
