"""Sentences of one language in, sentences of another out."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Int

from jaxformer.config import Learned, TransformerConfig
from jaxformer.decoding import (
    BeamState,
    Hypotheses,
    LogitsProcessor,
    SearchConfig,
    TranslationOptions,
    beam_more,
    row_values,
    without_values,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import group_by_length, pad_right
from jaxformer.pipelines.decoding_weights import prepare
from jaxformer.pipelines.inputs import (
    Texts,
    check_id,
    check_inputs,
    check_lengths,
    check_texts,
    suppressed_ids,
    unwrap_single,
)
from jaxformer.pipelines.rows import RowDecoder, decode_all, pace_of_whole_texts
from jaxformer.pipelines.sentences import begin_sentences, enter_sentences
from jaxformer.pretrained.loaded import Loaded
from jaxformer.runtime import concurrency
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


@overload
def translate(  # type: ignore[overload-overlap]
    loaded: Loaded,
    texts: str,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> str: ...
@overload
def translate(
    loaded: Loaded,
    texts: Texts,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> list[str]: ...
def translate(
    loaded: Loaded,
    texts: str | Texts,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Any:
    """The best translation of each text, or of the one text.

    `loaded` has the settings of the search. A `SearchConfig` or `TranslationOptions` in `settings`
    takes their place, `changes` replace single fields, as in beam_size=8, or in
    source_language="eng_Latn" and target_language="deu_Latn" for a model of many languages.

    `logits_processors` change the log-probabilities of each token after the settings have; its
    history begins with the token `bos` of the options. A function that is made anew in each call
    is compiled anew.

    A blank text gives an empty translation. Texts of similar length are translated together, in a
    few shapes (16, 32, 64, ... tokens) with two compiled programs each; on a CPU two run at a time.
    Where there are more texts than `batch_size`, the next takes the row of one that has ended. A
    translation does not depend on the other texts. A Ctrl-C ends the call after 8 tokens or a
    second, except while a program is compiled. Raises `DataError` for no text and for one of more
    than `max_len` tokens, `ConfigError` for another model, and for tokenizers, ids and settings
    that do not fit.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> type(jf.translate(loaded, "a rose")), jf.translate(loaded, ["", " "])
    (<class 'str'>, ['', ''])
    """
    hypotheses = _translate_texts(loaded, texts, settings, changes, logits_processors)
    return unwrap_single(texts, [translations[0].text for translations in hypotheses])


@overload
def translate_with_details(  # type: ignore[overload-overlap]
    loaded: Loaded,
    texts: str,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> list[Translation]: ...
@overload
def translate_with_details(
    loaded: Loaded,
    texts: Texts,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> list[list[Translation]]: ...
def translate_with_details(
    loaded: Loaded,
    texts: str | Texts,
    *settings: _Setting,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Any:
    """The `beam_size` best translations of each text, or of the one text, best first.

    Arguments and errors are as in `translate`.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> three = jf.translate_with_details(loaded, "a rose", beam_size=3, length_penalty=0.0)
    >>> len(three), abs(three[0].score - sum(three[0].log_probs)) < 1e-4
    (3, True)
    """
    hypotheses = _translate_texts(loaded, texts, settings, changes, logits_processors)
    return unwrap_single(texts, hypotheses)


def _translate_texts(
    loaded: Loaded,
    texts: str | Texts,
    settings: tuple[_Setting, ...],
    changes: dict[str, Any],
    logits_processors: Sequence[LogitsProcessor],
) -> list[list[Translation]]:
    """The translations of each text, best first."""
    lines, tokenizer, target = check_inputs(loaded, texts, EncoderDecoder)
    search, options = loaded.choose_settings(settings, changes, SearchConfig, TranslationOptions)
    search, options = with_target_language(target, search, options)
    sources = encode_sources(loaded.model, lines, tokenizer, search, options)
    hypotheses = _translate(loaded, sources, target, search, options, tuple(logits_processors))
    if any(np.isnan(each.score) for translations in hypotheses for each in translations):
        warnings.warn("the model's logits are NaN: the translations mean nothing", stacklevel=3)
    return hypotheses


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
    """The ids of each line, after the `prefix`; none for a blank line.

    They are what the folder's own tokenizer gives; without such settings the line's ids and EOS.
    Raises as `check_special_ids` does.
    """
    check_special_ids(tokenizer, search, options)
    lines = check_texts(lines)
    texts = [options.prefix + line for line in lines]
    rows = tokenizer.encode_inputs(texts, Template(last=search.eos[:1]), options.source_language)
    return [ids if line.strip() else [] for ids, line in zip(rows, lines, strict=True)]


def target_ids(
    lines: Texts,
    tokenizer: Tokenizer,
    search: SearchConfig,
    options: TranslationOptions,
    first: Sequence[int] = (),
) -> list[list[int]]:
    """The ids of each translation: those that all begin with, the line's, EOS; none for a blank
    one. Where the search forces no first id, all begin with `first`. Raises as `check_special_ids`
    does."""
    check_special_ids(tokenizer, search, options)
    first = first if search.forced_bos is None else [search.forced_bos]
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


class _Request(NamedTuple):
    """A sentence to translate."""

    source: list[int]
    """Its ids."""
    limit: int
    """The most tokens of its translation."""


@dataclass
class _Sentence:
    """A sentence that is being translated."""

    source: list[int]
    limit: int
    done: bool = False


def _translate(
    loaded: Loaded,
    sources: list[list[int]],
    tokenizer: Tokenizer,
    search: SearchConfig,
    options: TranslationOptions,
    logits_processors: tuple[LogitsProcessor, ...],
) -> list[list[Translation]]:
    """The translations of `sources`; an empty one has one empty translation."""
    model, params = prepare(loaded.model, loaded.params)
    config, programs = model.config, concurrency(params)
    check_id("bos", options.bos, config.vocab_size)
    search = replace(search, suppress_tokens=suppressed_ids(config, tokenizer, search))
    make_decoder = partial(
        _SentenceDecoder, model, params, tokenizer, search, options, logits_processors
    )

    def groups() -> Iterator[tuple[list[tuple[int, _Request]], Callable[[int], _SentenceDecoder]]]:
        for indices, size in group_by_length([*map(len, sources)], config.max_len, len(sources)):
            requests = []
            for i in reversed(indices):  # the longest begin first, so that rows end together
                limit = max_target_length(config, len(sources[i]), search, options)
                requests.append((i, _Request(sources[i], limit)))
            limits = [request.limit for _, request in requests]
            yield requests, partial(make_decoder, size, _target_size(config, limits, size, search))

    translations = dict(decode_all(groups(), programs, pace_of_whole_texts()))
    return [translations.get(i, [Translation("", 0.0, [], [])]) for i in range(len(sources))]


def _target_size(
    model_config: TransformerConfig, limits: Sequence[int], size: int, search: SearchConfig
) -> int:
    """The most tokens of translations with these `limits`, rounded up to one of few sizes.

    `size` is the length to which their sources are padded.
    """
    learned = isinstance(model_config.positions, Learned)
    most, fewest = max(limits), min(limits)
    search.check_end(fewest)
    if search.min_new_tokens > fewest:
        raise ConfigError(
            f"min_new_tokens={search.min_new_tokens}, but the translation of a sentence may have "
            f"at most {fewest} tokens: raise max_new_tokens or max_extra_tokens"
        )
    rounded = size + TranslationOptions.max_extra_tokens
    while rounded < most:
        size *= 2
        rounded = size + TranslationOptions.max_extra_tokens
    return min(rounded, model_config.max_len) if learned else rounded


class _SentenceDecoder(RowDecoder[_Request, _Sentence, list[Translation]]):
    """The search of `count` sentences."""

    def __init__(
        self,
        model: EncoderDecoder,
        params: Any,
        tokenizer: Tokenizer,
        search: SearchConfig,
        options: TranslationOptions,
        logits_processors: tuple[LogitsProcessor, ...],
        source_size: int,
        target_size: int,
        count: int,
    ) -> None:
        self.tokenizer, self.search, self.pad = tokenizer, search, options.pad
        self.source_size = source_size
        static: dict[str, Any] = {
            "search": replace(without_values(search), max_new_tokens=target_size),
            "bos": options.bos,
            "pad": options.pad,
            "logits_processors": logits_processors,
        }

        def shape_of(params: Any, rows: int) -> BeamState:
            source, limits = np.zeros((rows, source_size), np.int32), np.zeros(rows, np.int32)
            return begin_sentences.eval_shape(
                model, params, source, limits, row_values(search, rows), **static
            )

        super().__init__(model, params, count, options.batch_size, shape_of, beam_more)
        rows = np.zeros(self.entering, np.int32)
        self._enter = self.compile(enter_sentences, rows, *self._inputs([]), **static)

    def _inputs(self, sentences: Sequence[_Sentence]) -> tuple[Any, ...]:
        """Sources, limits and settings of `sentences` as arrays [K, ...]."""
        limits = np.zeros(self.entering, np.int32)
        limits[: len(sentences)] = [sentence.limit for sentence in sentences]
        sources = [sentence.source for sentence in sentences]
        source = pad_right(sources, self.entering, self.source_size, self.pad)
        return source, limits, row_values(self.search, self.entering)

    def start(self, request: _Request) -> _Sentence:
        """The sentence of `request`."""
        return _Sentence(request.source, request.limit)

    def enter(
        self, state: Any, rows: Int[np.ndarray, " K"], texts: Sequence[_Sentence]
    ) -> Iterator[BeamState]:
        """Encodes the sentences."""
        yield self._enter(state, rows, *self._inputs(texts))

    def results(self, state: BeamState) -> Hypotheses:
        """The hypotheses that have ended."""
        return state.finished

    def take(self, text: _Sentence, row: Hypotheses, stopped: bool) -> list[Translation] | None:
        """The translations of a sentence whose search has `stopped`; None before."""
        if not stopped:
            return None
        text.done = True
        translations = []
        for tokens, score, log_probs in zip(*row, strict=True):
            if score == -np.inf:
                continue
            tokens = tokens[: text.limit]
            ends = np.flatnonzero(np.isin(tokens, self.search.eos))
            count = int(ends[0]) + 1 if ends.size else len(tokens)
            ids = tokens[:count].tolist()
            written = self.tokenizer.decode(ids)
            translations.append(Translation(written, float(score), ids, log_probs[:count].tolist()))
        return translations


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
