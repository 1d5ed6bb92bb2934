"""Sentences to translate, as the ids that an encoder reads."""

from collections.abc import Sequence

from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import (
    check_lengths,
    check_model,
    check_texts,
    check_tokenizer,
)
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.text.tokenizers.tokenizer import all_special_ids


def find_too_long(
    model: EncoderDecoder,
    lines: Sequence[str],
    tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> list[int]:
    """The indices of the lines of more than `max_len` tokens, which `translate` refuses."""
    lengths = map(len, source_ids(lines, tokenizer, search, options))
    return [i for i, length in enumerate(lengths) if length > model.config.max_len]


def encode_sources(
    model: EncoderDecoder,
    lines: Sequence[str],
    tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> list[list[int]]:
    """Each line's ids and EOS; nothing for a blank line. Raises as `translate` does."""
    check_model(model, EncoderDecoder)
    check_tokenizer(tokenizer, model.config.source_vocab_size or model.config.vocab_size)
    sources = source_ids(lines, tokenizer, search, options)
    check_lengths(sources, model.config.max_len)
    return sources


def source_ids(
    lines: Sequence[str], tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> list[list[int]]:
    """The ids that the encoder reads for each line; none for a blank one."""
    first = first_ids(tokenizer, options)
    return [first + ids if ids else [] for ids in with_eos(lines, tokenizer, search, options)]


def first_ids(tokenizer: Tokenizer, options: TranslationOptions) -> list[int]:
    """The ids before each source: `<s>` of BART, none for models that are trained here."""
    bos = tokenizer.special.bos if options.source_bos else None
    return [] if bos is None else [bos]


def with_eos(
    lines: Sequence[str], tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> list[list[int]]:
    """The ids of each line and EOS; none for a blank one.

    Raises `DataError` where the tokenizer's EOS or padding are other ids than the settings'.
    """
    special, eos = tokenizer.special, search.eos[0]
    known = {special.eos} if special.eos is not None else _special_ids(tokenizer)
    if known.isdisjoint(search.eos) or special.pad not in (None, options.pad):
        raise DataError(
            f"eos={search.eos} and pad={options.pad}, but the tokenizer has EOS {special.eos} and "
            f"padding {special.pad}: give the model's own tokenizer, and for a folder of "
            "transformers the settings of load_generation_config"
        )
    lines = check_texts(lines)
    ids = tokenizer.encode_batch(lines)
    return [x + [eos] if line.strip() else [] for x, line in zip(ids, lines, strict=True)]


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return set(all_special_ids(tokenizer.library_tokenizer).values())
