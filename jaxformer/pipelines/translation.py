"""Sentences of one language in, sentences of another out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxformer.config import Learned, TransformerConfig
from jaxformer.decoding import Hypotheses, SearchConfig, beam_search
from jaxformer.decoding.pipeline_options import TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import (
    check_id,
    check_tokenizer,
    compile_for,
    group_by_length,
    make_step_fn,
    pad_right,
    split_batch,
)
from jaxformer.pipelines.encoding import encode_sources
from jaxformer.runtime import concurrency, concurrently
from jaxformer.text.tokenizers import Tokenizer


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


@partial(jax.jit, static_argnames=("model", "search", "bos", "pad"))
def translate_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_new_tokens: Int[Array, " B"],
    search: SearchConfig,
    *,
    bos: int = TranslationOptions.bos,
    pad: int = TranslationOptions.pad,
) -> Hypotheses:
    """The `search.beam_size` best translations of each row of `source`, padded with `pad`.

    Translation b has at most `max_new_tokens[b]` tokens, and all at most `search.max_new_tokens`,
    which must be given. A pure function: it can be jitted, vmapped (over an ensemble's `params`)
    and exported.
    """
    cache = model.apply(
        {"params": params},
        source,
        source != pad,
        max_length=search.max_new_tokens,
        num_beams=search.beam_size,
        method="init_cache",
    )
    start = jax.numpy.full(source.shape[:1], bos, jax.numpy.int32)
    return beam_search(make_step_fn(model, params), cache, start, max_new_tokens, search)


def translate(
    model: EncoderDecoder,
    params: Any,
    lines: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> list[list[Translation]]:
    """The `search.beam_size` best translations of each line, best first.

    A blank line gives one empty translation. Lines of similar length are translated together, in a
    few shapes (16, 32, 64, ... tokens) with one compiled program each; on a CPU two run at a time.
    A line's translations do not depend on the other lines. Raises `DataError` for a line of more
    than `max_len` tokens, `ConfigError` for tokenizers and ids that do not fit the model.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]  # not trained
    >>> search = jf.SearchConfig(beam_size=3, length_penalty=0.0)
    >>> best, blank = jf.translate(model, params, ["a rose", ""], tokenizer, tokenizer, search)
    >>> len(best), len(blank), abs(best[0].score - sum(best[0].log_probs)) < 1e-4
    (3, 1, True)
    """

    def compile_batch(batch: SourceBatch) -> Callable[[], Hypotheses]:
        sized = replace(search, max_new_tokens=batch.size)
        arrays = batch.source, batch.max_new_tokens
        ids = {"bos": options.bos, "pad": options.pad}
        run = compile_for(params, translate_ids, model, *arrays, search=sized, **ids)
        return lambda: run(*arrays)

    sentences = encode_sources(model, lines, source_tokenizer, search, options)
    tokenizer = target_tokenizer
    return translate_batches(model, params, sentences, tokenizer, search, options, compile_batch)


class SourceBatch(NamedTuple):
    """Sentences `indices` as `source` [B, S]; their translations take at most `size` tokens."""

    indices: list[int]
    source: np.ndarray
    max_new_tokens: np.ndarray
    """The most tokens of the translation of each row."""
    size: int


def translate_batches(
    model: EncoderDecoder,
    params: Any,
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
    check_tokenizer(tokenizer, model.config.vocab_size)
    check_id("bos", options.bos, model.config.vocab_size)
    count = concurrency(params)
    batch_size = split_batch(sum(map(bool, sentences)), count, options.batch_size)
    batches = list(_batches(sentences, model.config, search, options, batch_size))
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
    batch_size: int,
) -> Iterator[SourceBatch]:
    """`sentences` in batches of `batch_size`, the longest last."""
    groups = group_by_length([len(s) for s in sentences], model_config.max_len, batch_size)
    for indices, size in groups:
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
        max_new_tokens = np.ones(batch_size, np.int32)
        max_new_tokens[: len(indices)] = limits
        source = pad_right([sentences[i] for i in indices], batch_size, size, options.pad)
        yield SourceBatch(indices, source, max_new_tokens, longest)


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
