"""Sentences of one language in, sentences of another out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxformer.config import Learned, TransformerConfig
from jaxformer.decoding import (
    GenerationConfig,
    Hypotheses,
    Prompts,
    SamplerConfig,
    SamplingConfig,
    beam_search,
    make_processors,
    make_sampler,
    sample,
)
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines.batching import (
    check_tokenizer,
    group_by_length,
    make_step_fn,
    pad_right,
    split_batch,
)
from jaxformer.pipelines.encoding import encode_sources
from jaxformer.runtime.concurrency import concurrency, concurrently
from jaxformer.text.minimum_bayes_risk import Utility, expected_utilities
from jaxformer.text.tokenizers import Tokenizer


class Translation(NamedTuple):
    """One hypothesis of a search.

    >>> best = Translation(text="Haus", score=-0.75, ids=[5, 2], log_probs=[-0.5, -0.25])
    >>> best.score == sum(best.log_probs)  # with length_penalty=0
    True
    """

    text: str
    """The translation."""
    score: float
    """Its log-probability under the length penalty; of a sample, its log-probability."""
    ids: list[int]
    """Its token ids, EOS included."""
    log_probs: list[float]
    """The log-probability (nats) of each token."""


@partial(jax.jit, static_argnames=("model", "config", "max_length"))
def translate_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_lengths: Int[Array, " B"],
    config: GenerationConfig = GenerationConfig(),
    *,
    max_length: int,
) -> Hypotheses:
    """The `config.beam_size` best translations of each row of `source`, padded with `config.pad`.

    Translation b has at most `max_lengths[b]` <= `max_length` tokens. A pure function: it can be
    jitted, vmapped (over an ensemble's `params`) and exported.
    """
    cache = model.apply(
        {"params": params},
        source,
        source != config.pad,
        max_length=max_length,
        num_beams=config.beam_size,
        method="init_cache",
    )
    bos = jax.numpy.full(source.shape[:1], config.bos, jax.numpy.int32)
    step = make_step_fn(model, params)
    return beam_search(step, cache, bos, max_lengths, config, max_length=max_length)


def translate(
    model: EncoderDecoder,
    params: Any,
    lines: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    config: GenerationConfig = GenerationConfig(),
) -> list[list[Translation]]:
    """The `config.beam_size` best translations of each line, best first.

    A blank line gives one empty translation. Lines of similar length are translated together, in a
    few shapes (16, 32, 64, ... tokens) with one compiled program each; on a CPU two run at a time.
    A line's translations do not depend on the other lines. Raises `DataError` for a line of more
    than `max_len` tokens, `ConfigError` for tokenizers that do not fit the model.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]  # not trained
    >>> search = jf.GenerationConfig(beam_size=3, length_penalty=0.0)
    >>> found = jf.translate(model, params, ["a rose", ""], tokenizer, tokenizer, search)
    >>> [len(translations) for translations in found]  # the second line is blank
    [3, 1]
    >>> best = found[0][0]
    >>> abs(best.score - sum(best.log_probs)) < 1e-4
    True
    """
    check_tokenizer(target_tokenizer, model.config.vocab_size)
    sentences = encode_sources(model, lines, source_tokenizer, config)

    def compile_batch(batch: _Batch) -> Callable[[], Hypotheses]:
        inputs = batch.source, batch.max_lengths
        limit = batch.max_length
        return _compile(translate_ids, model, params, inputs, config, max_length=limit)

    return _translate(model, params, sentences, target_tokenizer, config, compile_batch)


@partial(jax.jit, static_argnames=("model", "config", "sampler", "max_length"))
def sample_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_lengths: Int[Array, " B"],
    example_ids: Int[Array, " B"],
    rng: Key[Array, ""],
    config: GenerationConfig = GenerationConfig(),
    sampler: SamplerConfig = SamplerConfig(),
    *,
    max_length: int,
) -> Hypotheses:
    """A random translation (W = 1) of each row of `source`; lengths are as in `translate_ids`.

    `rng` and its `example_ids` decide what is drawn for a row. Of `config` the special ids and the
    logits processors count. A translation of the maximum length may end without EOS.
    """
    cache = model.apply(
        {"params": params}, source, source != config.pad, max_length=max_length, method="init_cache"
    )
    bos = jax.numpy.full(source.shape[:1], config.bos, jax.numpy.int32)
    penalties, constraints = make_processors(config)
    return sample(
        make_step_fn(model, params),
        cache,
        Prompts(bos, max_lengths, example_ids),
        rng,
        SamplingConfig(max_new_tokens=max_length, eos=config.eos),
        sampler=make_sampler(sampler),
        logits_processors=penalties + constraints,
    )


def sample_translations(
    model: EncoderDecoder,
    params: Any,
    lines: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    config: GenerationConfig = GenerationConfig(),
    sampler: SamplerConfig = SamplerConfig(),
    *,
    count: int = 1,
    first_example_id: int = 0,
) -> list[list[Translation]]:
    """`count` random translations of each line, in the order in which they are drawn.

    Line i is example `first_example_id + i`; with the seed of `sampler` this decides what is drawn,
    not the other lines. Lengths, special ids and logits processors are those of `config`. Blank
    lines, batches and errors are as in `translate`.

    >>> from jaxformer.text.tokenizers import train_words
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2}
    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(8, **sizes, **layers))
    >>> ids, tokenizer = jnp.ones((1, 3), int), train_words(["a rose eine Rose"], 8)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]  # not trained
    >>> search = jf.GenerationConfig(max_length=2)
    >>> found = sample_translations(model, params, ["a"], tokenizer, tokenizer, search, count=3)
    >>> len(found[0])
    3
    """
    check_tokenizer(target_tokenizer, model.config.vocab_size)
    sentences = encode_sources(model, lines, source_tokenizer, config)
    rng, sampler = jax.random.key(sampler.seed), replace(sampler, seed=0)

    def compile_batch(batch: _Batch) -> Callable[[], Hypotheses]:
        example_ids = np.zeros(len(batch.source), np.int32)
        example_ids[: len(batch.indices)] = batch.indices
        example_ids += first_example_id * count
        inputs = batch.source, batch.max_lengths, example_ids, rng
        limit = batch.max_length
        return _compile(sample_ids, model, params, inputs, config, sampler, max_length=limit)

    repeated = [sentence for sentence in sentences for _ in range(count)]
    found = _translate(model, params, repeated, target_tokenizer, config, compile_batch)
    drawn = [best[0] for best in found]
    return [drawn[i : i + count] for i in range(0, len(drawn), count)]


def rank_by_utility(samples: Sequence[Translation], utility: Utility) -> list[Translation]:
    """The distinct ones of `samples`, that of the least Bayes risk first.

    Their scores are their `expected_utilities`. Of equal ones the first comes first.

    >>> def same_length(text, reference):
    ...     return float(len(text) == len(reference))
    >>> samples = [Translation(text, 0.0, [], []) for text in ("Haus", "Hut", "Hof")]
    >>> [sample.text for sample in rank_by_utility(samples, same_length)]
    ['Hut', 'Hof', 'Haus']
    """
    values = expected_utilities([sample.text for sample in samples], utility)
    distinct = {
        sample.text: sample._replace(score=value)
        for sample, value in zip(reversed(samples), reversed(values), strict=True)
    }
    return sorted(reversed(distinct.values()), key=lambda sample: -sample.score)


def max_target_length(
    model_config: TransformerConfig, source_length: int, config: GenerationConfig
) -> int:
    """The most tokens of a translation; with learned positions at most `max_len`.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> max_target_length(config, 20, jf.GenerationConfig(max_extra_tokens=10))
    30
    """
    length = config.max_length or source_length + config.max_extra_tokens
    return (
        min(length, model_config.max_len) if isinstance(model_config.positions, Learned) else length
    )


class _Batch(NamedTuple):
    """Sentences `indices` as `source` [B, S], with at most `max_length` tokens for each."""

    indices: list[int]
    source: np.ndarray
    max_lengths: np.ndarray
    max_length: int


def _batches(
    sentences: list[list[int]],
    model_config: TransformerConfig,
    config: GenerationConfig,
    batch_size: int,
) -> Iterator[_Batch]:
    """`sentences` in batches of `batch_size`, the longest last."""
    groups = group_by_length([len(s) for s in sentences], model_config.max_len, batch_size)
    for indices, size in groups:
        max_lengths = np.ones(batch_size, np.int32)
        max_lengths[: len(indices)] = [
            config.max_length or len(sentences[i]) + config.max_extra_tokens for i in indices
        ]
        source = pad_right([sentences[i] for i in indices], batch_size, size, config.pad)
        max_length = max_target_length(model_config, size, config)
        yield _Batch(indices, source, max_lengths, max_length)


def _translate(
    model: EncoderDecoder,
    params: Any,
    sentences: list[list[int]],
    tokenizer: Tokenizer,
    config: GenerationConfig,
    compile_batch: Callable[[_Batch], Callable[[], Hypotheses]],
) -> list[list[Translation]]:
    """The translations of `sentences`, in batches; an empty one gives one empty translation."""
    count = concurrency(params)
    batch_size = split_batch(sum(map(bool, sentences)), count, config.batch_size)
    batches = list(_batches(sentences, model.config, config, batch_size))
    runs = map(compile_batch, batches)
    results = [[Translation("", 0.0, [], [])] for _ in sentences]
    for batch, found in zip(batches, concurrently(runs, count), strict=True):
        for row, index in enumerate(batch.indices):
            limit = min(int(batch.max_lengths[row]), batch.max_length)
            results[index] = _translations(found, row, tokenizer, config, limit)
    return results


def _compile(
    function: Any,
    model: EncoderDecoder,
    params: Any,
    inputs: tuple[Any, ...],
    *settings: Any,
    max_length: int,
) -> Callable[[], Hypotheses]:
    """`function` of `inputs`, to be called later; its program is compiled here."""
    compiled = function.lower(model, params, *inputs, *settings, max_length=max_length).compile()
    return lambda: jax.device_get(compiled(params, *inputs))


def _translations(
    found: Hypotheses, row: int, tokenizer: Tokenizer, config: GenerationConfig, limit: int
) -> list[Translation]:
    translations = []
    for tokens, score, log_probs in zip(*(leaf[row] for leaf in found), strict=True):
        if score == -np.inf:
            continue
        ends = np.flatnonzero(np.isin(tokens, config.eos))
        count = int(ends[0]) + 1 if ends.size else limit
        ids = tokens[:count].tolist()
        text = tokenizer.decode(ids)
        translations.append(Translation(text, float(score), ids, log_probs[:count].tolist()))
    return translations
