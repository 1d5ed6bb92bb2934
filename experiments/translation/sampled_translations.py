"""Random translations, and the one of the least Bayes risk among them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from experiments.harness.runs.decoding_options import UtilityName
from jaxformer import optional_dependencies
from jaxformer.decoding import (
    Hypotheses,
    LogitsConfig,
    Prompts,
    SamplerConfig,
    SamplingConfig,
    SearchConfig,
    force_token_at,
    sample,
)
from jaxformer.decoding.pipeline_options import TranslationOptions
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import Translation, encode_sources, make_step_fn
from jaxformer.pipelines.batching import compile_for
from jaxformer.pipelines.translation import SourceBatch, translate_batches
from jaxformer.text.tokenizers import Tokenizer

Utility = Callable[[str, str], float]
"""utility(hypothesis, reference): how good `hypothesis` is where `reference` is right."""


@partial(jax.jit, static_argnames=("model", "search", "sampler", "bos", "pad"))
def sample_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_new_tokens: Int[Array, " B"],
    example_ids: Int[Array, " B"],
    rng: Key[Array, ""],
    search: SearchConfig,
    sampler: SamplerConfig = SamplerConfig(),
    *,
    bos: int = TranslationOptions.bos,
    pad: int = TranslationOptions.pad,
) -> Hypotheses:
    """A random translation (W = 1) of each row of `source`; lengths are as in `translate_ids`.

    `rng` and its `example_ids` decide what is drawn for a row. Of `search` the EOS ids, the longest
    length and the changes of logits count. A translation of that length may end without EOS.
    """
    mask, size = source != pad, search.max_new_tokens
    cache = model.apply({"params": params}, source, mask, max_length=size, method="init_cache")
    shared = {field.name: getattr(search, field.name) for field in fields(LogitsConfig)}
    drawing = {field.name: getattr(sampler, field.name) for field in fields(SamplerConfig)}
    forced = [] if search.forced_bos is None else [force_token_at(search.forced_bos)]
    return sample(
        make_step_fn(model, params),
        cache,
        Prompts(jax.numpy.full(len(source), bos, jax.numpy.int32), max_new_tokens, example_ids),
        rng,
        SamplingConfig(max_new_tokens=size or 1, **shared, **drawing),
        eos=search.eos,
        logits_processors=forced,
    )


def sample_translations(
    model: EncoderDecoder,
    params: Any,
    lines: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
    sampler: SamplerConfig = SamplerConfig(),
    *,
    seed: int = 0,
    count: int = 1,
    first_example_id: int = 0,
) -> list[list[Translation]]:
    """`count` random translations of each line, in the order in which they are drawn.

    Line i is example `first_example_id + i`; with `seed` this decides what is drawn, not the other
    lines. Lengths, EOS ids and changes of logits are those of `search`. Blank lines, batches and
    errors are as in `translate`.
    """
    rng = jax.random.key(seed)

    def compile_batch(batch: SourceBatch) -> Callable[[], Hypotheses]:
        example_ids = np.zeros(len(batch.source), np.int32)
        example_ids[: len(batch.indices)] = batch.indices
        example_ids += first_example_id * count
        arrays = batch.source, batch.max_new_tokens, example_ids, rng
        settings = {"search": replace(search, max_new_tokens=batch.size), "sampler": sampler}
        ids = {"bos": options.bos, "pad": options.pad}
        run = compile_for(params, sample_ids, model, *arrays, **settings, **ids)
        return lambda: run(*arrays)

    sentences = encode_sources(model, lines, source_tokenizer, search, options)
    repeated = [sentence for sentence in sentences for _ in range(count)]
    tokenizer = target_tokenizer
    found = translate_batches(model, params, repeated, tokenizer, search, options, compile_batch)
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


def sentence_utility(name: UtilityName) -> Utility:
    """sacreBLEU's score (0 to 100) of one sentence: chrF2, or BLEU with effective order.

    Raises `MissingExtra` without sacrebleu.
    """
    metrics = optional_dependencies.load("sacrebleu").metrics
    metric = metrics.CHRF() if name == "chrf" else metrics.BLEU(effective_order=True)
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score


def expected_utilities(samples: Sequence[str], utility: Utility) -> list[float]:
    """The mean utility of each of `samples` over all of them (Eikema & Aziz 2020, section 6).

    The samples stand for the model's distribution. Equal ones are compared once and counted.

    >>> expected_utilities(["a", "b", "a", "a"], lambda hypothesis, text: float(hypothesis == text))
    [0.75, 0.25, 0.75, 0.75]
    """
    counts = Counter(samples)
    values = {
        hypothesis: math.fsum(utility(hypothesis, text) * n for text, n in counts.items())
        for hypothesis in counts
    }
    return [values[sample] / len(samples) for sample in samples]
