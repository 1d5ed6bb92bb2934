"""Sentences to translate, as the ids that an encoder reads."""

from collections.abc import Sequence

from jaxformer.decoding import GenerationConfig
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import check_lengths, check_tokenizer
from jaxformer.text.tokenizers import BOS, EOS, PAD, Tokenizer, require_standard_ids


def find_too_long(
    model: EncoderDecoder,
    lines: Sequence[str],
    tokenizer: Tokenizer,
    config: GenerationConfig = GenerationConfig(),
) -> list[int]:
    """The indices of the lines of more than `max_len` tokens, which `translate` refuses.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2, "max_len": 4}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> tokenizer = train_words(["a rose is a rose"], 8)
    >>> find_too_long(model, ["a rose", "a rose is a rose"], tokenizer)
    [1]
    """
    lengths = map(len, source_ids(lines, tokenizer, config))
    return [i for i, length in enumerate(lengths) if length > model.config.max_len]


def encode_sources(
    model: EncoderDecoder,
    lines: Sequence[str],
    tokenizer: Tokenizer,
    config: GenerationConfig = GenerationConfig(),
) -> list[list[int]]:
    """Each line's ids and EOS; nothing for a blank line.

    For models that were not trained here, BOS comes first where the vocabulary has one (BART).
    Raises as `translate` does, and `DataError` if `config` has the special ids of the models
    trained here and `tokenizer` has others.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> tokenizer = train_words(["a rose"], 8)
    >>> encode_sources(model, ["a rose", ""], tokenizer)  # 2 is EOS
    [[4, 5, 2], []]
    """
    check_tokenizer(tokenizer, model.config.source_vocab_size or model.config.vocab_size)
    sources = source_ids(lines, tokenizer, config)
    check_lengths(sources, model.config.max_len)
    return sources


def source_ids(
    lines: Sequence[str], tokenizer: Tokenizer, config: GenerationConfig
) -> list[list[int]]:
    """The ids that the encoder reads for each line; none for a blank one."""
    first = first_ids(tokenizer, config)
    return [first + ids if ids else [] for ids in with_eos(lines, tokenizer, config)]


def first_ids(tokenizer: Tokenizer, config: GenerationConfig) -> list[int]:
    """The ids before each text of a model of others, such as BART's `<s>`."""
    bos = None if _has_our_ids(config) else tokenizer.special.bos
    return [] if bos is None else [bos]


def _has_our_ids(config: GenerationConfig) -> bool:
    """Whether the special ids are those of the models trained here."""
    return (config.bos, config.eos, config.pad) == (BOS, (EOS,), PAD)


def with_eos(
    lines: Sequence[str], tokenizer: Tokenizer, config: GenerationConfig
) -> list[list[int]]:
    """The ids of each line and EOS; none for a blank one."""
    if _has_our_ids(config):
        require_standard_ids(tokenizer)
    ids = tokenizer.encode_batch(lines)
    eos = config.eos[0]
    return [x + [eos] if line.strip() else [] for x, line in zip(ids, lines, strict=True)]
