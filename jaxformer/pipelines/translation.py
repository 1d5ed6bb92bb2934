"""Sentences of one language in, sentences of another out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxformer.config import Learned, TransformerConfig
from jaxformer.decoding import Hypotheses, Queue, SearchConfig, TranslationOptions, beam_search
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import (
    Texts,
    as_given,
    can_refill,
    check_id,
    check_inputs,
    check_lengths,
    check_texts,
    compile_for,
    divide,
    group_by_length,
    make_step_fn,
    pad_right,
    split_batch,
    split_queue,
    unstacked,
)
from jaxformer.pretrained.loaded import Loaded
from jaxformer.runtime import concurrency, concurrently
from jaxformer.text.tokenizers import Template, Tokenizer
from jaxformer.text.tokenizers.tokenizer import all_special_ids

_Setting = SearchConfig | TranslationOptions


class Translation(NamedTuple):
    """One hypothesis of a search."""

    text: str
    """The translation."""
    score: float
    """Its log-probability under the length penalty."""
    ids: list[int]
    """Its token ids, EOS included."""
    log_probs: list[float]
    """The log-probability (nats) of each token."""


@partial(jax.jit, static_argnames=("model", "search", "bos", "pad", "rows"))
def translate_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_new_tokens: Int[Array, " B"],
    search: SearchConfig,
    *,
    bos: int = TranslationOptions.bos,
    pad: int = TranslationOptions.pad,
    rows: int | None = None,
) -> Hypotheses:
    """The `search.beam_size` best translations of each row of `source`, padded with `pad`.

    Translation b has at most `max_new_tokens[b]` tokens, and all at most `search.max_new_tokens`,
    which must be given. With `rows` fewer than B, so many are translated together: when some end,
    the next take their rows (`Queue`), up to the first with `max_new_tokens` 0. A pure function: it
    can be jitted, vmapped (over an ensemble's `params`) and exported.
    """
    model, params = unstacked(model, params)

    def begin(source: Int[Array, "B S"]) -> Any:
        return model.apply(
            {"params": params},
            source,
            source != pad,
            max_length=search.max_new_tokens,
            num_beams=search.beam_size,
            method="init_cache",
        )

    cache: Any = begin(source) if rows is None else None
    if rows is not None:
        count = (max_new_tokens > 0).sum()
        cache = Queue(lambda numbers: begin(source[numbers]), count, rows)
    start = jax.numpy.full(source.shape[:1], bos, jax.numpy.int32)
    return beam_search(make_step_fn(model, params), cache, start, max_new_tokens, search)


@overload
def translate(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *settings: _Setting, details: Literal[False] = ..., **changes: Any
) -> str: ...
@overload
def translate(
    loaded: Loaded, texts: Texts, *settings: _Setting, details: Literal[False] = ..., **changes: Any
) -> list[str]: ...
@overload
def translate(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *settings: _Setting, details: Literal[True], **changes: Any
) -> list[Translation]: ...
@overload
def translate(
    loaded: Loaded, texts: Texts, *settings: _Setting, details: Literal[True], **changes: Any
) -> list[list[Translation]]: ...
def translate(
    loaded: Loaded, texts: str | Texts, *settings: _Setting, details: bool = False, **changes: Any
) -> Any:
    """The best translation of each text, or of the one text.

    With `details` the `beam_size` best ones of each text, best first, as `Translation`s. The search
    is that of `loaded`; a `SearchConfig` or `TranslationOptions` in `settings` replaces its own,
    `changes` replace single fields, as in beam_size=8, or in source_language="eng_Latn" and
    target_language="deu_Latn" for a model of many languages.

    A blank text gives an empty translation. Texts of similar length are translated together, in a
    few shapes (16, 32, 64, ... tokens) with one compiled program each; on a CPU two run at a time.
    Of more texts than `batch_size` the next takes the row of one that has ended (on one device,
    without a window, ALiBi and relative positions). A translation does not depend on the other
    texts. Raises `DataError` for no text and for one of
    more than `max_len` tokens, `ConfigError` for another model, and for tokenizers, ids and
    settings that do not fit.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> type(jf.translate(loaded, "a rose")), jf.translate(loaded, ["", " "])
    (<class 'str'>, ['', ''])
    >>> three = jf.translate(loaded, "a rose", beam_size=3, length_penalty=0.0, details=True)
    >>> len(three), abs(three[0].score - sum(three[0].log_probs)) < 1e-4
    (3, True)
    """
    lines, tokenizer, target = check_inputs(loaded, texts, EncoderDecoder)
    search, options = loaded.choose_settings(settings, changes, SearchConfig, TranslationOptions)
    search, options = with_target_language(target, search, options)

    def compile_batch(batch: SourceBatch) -> Callable[[], Hypotheses]:
        sized = replace(search, max_new_tokens=batch.size)
        arrays = batch.source, batch.max_new_tokens
        static = {"search": sized, "bos": options.bos, "pad": options.pad, "rows": batch.rows}
        run = compile_for(loaded.params, translate_ids, loaded.model, *arrays, **static)
        return lambda: run(*arrays)

    sentences = encode_sources(loaded.model, lines, tokenizer, search, options)
    results = translate_batches(loaded, sentences, target, search, options, compile_batch)
    return as_given(texts, results if details else [best[0].text for best in results])


def encode_sources(
    model: EncoderDecoder,
    lines: Iterable[str],
    tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> list[list[int]]:
    """The ids that the encoder reads for each line; none for a blank one.

    Raises as `translate` does.
    """
    sources = source_ids(lines, tokenizer, search, options)
    check_lengths(sources, model.config.max_len)
    return sources


def find_too_long(
    model: EncoderDecoder,
    lines: Iterable[str],
    tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> list[int]:
    """The indices of the lines of more than `max_len` tokens, which `translate` refuses."""
    sources = source_ids(lines, tokenizer, search, options)
    return [i for i, ids in enumerate(sources) if len(ids) > model.config.max_len]


def source_ids(
    lines: Texts, tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> list[list[int]]:
    """The ids of each line as the folder's own tokenizer gives them, or else those of the line and
    EOS; none for a blank one. Raises as `check_special_ids` does."""
    check_special_ids(tokenizer, search, options)
    lines = check_texts(lines)
    rows = tokenizer.encode_inputs(lines, Template(last=search.eos[:1]), options.source_language)
    return [ids if line.strip() else [] for ids, line in zip(rows, lines, strict=True)]


def target_ids(
    lines: Texts, tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> list[list[int]]:
    """The ids of each translation: that which all begin with, the line's, EOS; none for a blank
    one. Raises as `check_special_ids` does."""
    check_special_ids(tokenizer, search, options)
    first = [] if search.forced_bos is None else [search.forced_bos]
    lines = check_texts(lines)
    rows = [[*first, *ids, search.eos[0]] for ids in tokenizer.encode_batch(lines)]
    return [ids if line.strip() else [] for ids, line in zip(rows, lines, strict=True)]


def with_target_language(
    tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> tuple[SearchConfig, TranslationOptions]:
    """The settings by which translations are in the language that is asked for, or the folder's.

    Raises `ConfigError` for a language that the folder does not have.
    """
    languages = tokenizer.languages
    language = options.target_language or (None if languages is None else languages.target)
    if language is None:
        return search, options
    if languages is None:
        raise ConfigError(
            f"target_language={language!r}, but the folder's tokenizer has no tokens of languages: "
            "leave it out"
        )
    index = languages.id_of(language)
    if languages.begins:
        return replace(search, forced_bos=index), options
    return search, replace(options, bos=index)  # MBart (Liu et al. 2020) starts with it


def first_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids before each text: `<s>` of BART, none for models that are trained here."""
    return [*(tokenizer.template or Template()).first]


def check_special_ids(
    tokenizer: Tokenizer, search: SearchConfig, options: TranslationOptions
) -> None:
    """Raises `DataError` where the tokenizer's EOS or padding are other ids than the settings'."""
    special = tokenizer.special
    known = {special.eos}
    if special.eos is None:
        known = set(all_special_ids(tokenizer.library_tokenizer).values())
    if known.isdisjoint(search.eos) or special.pad not in (None, options.pad):
        raise DataError(
            f"eos={search.eos} and pad={options.pad}, but the tokenizer has EOS {special.eos} and "
            f"padding {special.pad}: give the model's own tokenizer, and for a folder of "
            "transformers its settings (jf.load reads them)"
        )


class SourceBatch(NamedTuple):
    """Sentences `indices` as `source` [B, S]; their translations take at most `size` tokens."""

    indices: list[int]
    source: np.ndarray
    max_new_tokens: np.ndarray
    """The most tokens of the translation of each row."""
    size: int
    rows: int | None
    """The number of sentences that are translated together; None: all."""


def translate_batches(
    loaded: Loaded,
    sentences: list[list[int]],
    tokenizer: Tokenizer,
    search: SearchConfig,
    options: TranslationOptions,
    compile_batch: Callable[[SourceBatch], Callable[[], Hypotheses]],
) -> list[list[Translation]]:
    """The translations of `sentences`, as `encode_sources` gives them, in batches.

    `compile_batch(batch)` compiles a program and returns a function that runs it. An empty sentence
    has one empty translation.
    """
    config = loaded.model.config
    check_id("bos", options.bos, config.vocab_size)
    count = concurrency(loaded.params)
    total = sum(map(bool, sentences))
    rows = split_batch(total, count, options.batch_size)
    most = split_queue(total, count, rows) if can_refill(loaded.model, loaded.params) else rows
    batches = list(_batches(sentences, config, search, options, (rows, most, count)))
    runs = map(compile_batch, batches)
    results = [[Translation("", 0.0, [], [])] for _ in sentences]
    for batch, hypotheses in zip(batches, concurrently(runs, count), strict=True):
        for row, index in enumerate(batch.indices):
            limit = min(int(batch.max_new_tokens[row]), batch.size)
            results[index] = _translations(hypotheses, row, tokenizer, search.eos, limit)
    return results


def max_target_length(
    model_config: TransformerConfig,
    source_length: int,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> int:
    """The most tokens of a translation; with learned positions at most `max_len`."""
    length = search.max_new_tokens or source_length + options.max_extra_tokens
    learned = isinstance(model_config.positions, Learned)
    return min(length, model_config.max_len) if learned else length


def _batches(
    sentences: list[list[int]],
    model_config: TransformerConfig,
    search: SearchConfig,
    options: TranslationOptions,
    sizes: tuple[int, int, int],
) -> Iterator[SourceBatch]:
    """`sentences` in the parts that `divide(..., *sizes)` makes of a group; the longest last."""
    rows = sizes[0]
    groups = group_by_length([len(s) for s in sentences], model_config.max_len, len(sentences))
    parts = ((*part, size) for group, size in groups for part in divide(group, *sizes))
    for indices, batch_size, size in parts:
        indices.reverse()  # The longest begin first, so that rows end together.
        limits = [
            search.max_new_tokens or len(sentences[i]) + options.max_extra_tokens for i in indices
        ]
        longest = max_target_length(model_config, size, search, options)
        if search.min_new_tokens > min(*limits, longest):
            raise ConfigError(
                f"min_new_tokens={search.min_new_tokens}, but the translation of a sentence may "
                f"have at most {min(*limits, longest)} tokens: raise max_new_tokens or "
                "max_extra_tokens"
            )
        max_new_tokens = np.zeros(batch_size, np.int32)
        max_new_tokens[: len(indices)] = limits
        source = pad_right([sentences[i] for i in indices], batch_size, size, options.pad)
        waiting = rows if batch_size > rows else None
        yield SourceBatch(indices, source, max_new_tokens, longest, waiting)


def _translations(
    hypotheses: Hypotheses, row: int, tokenizer: Tokenizer, eos: tuple[int, ...], limit: int
) -> list[Translation]:
    translations = []
    for tokens, score, log_probs in zip(*(leaf[row] for leaf in hypotheses), strict=True):
        if score == -np.inf:
            continue
        ends = np.flatnonzero(np.isin(tokens, eos))
        count = int(ends[0]) + 1 if ends.size else limit
        ids = tokens[:count].tolist()
        text = tokenizer.decode(ids)
        translations.append(Translation(text, float(score), ids, log_probs[:count].tolist()))
    return translations
