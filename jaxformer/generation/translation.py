"""Sentences of one language in, sentences of another out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import TransformerConfig, check_least
from jaxformer.data import DataError
from jaxformer.decoding import Hypotheses, beam_search
from jaxformer.generation.batches import groups, pad, share
from jaxformer.generation.concurrency import concurrency, concurrently
from jaxformer.generation.manner import OWN, Manner
from jaxformer.generation.step import step_function
from jaxformer.losses import token_log_probs
from jaxformer.models import EncoderDecoder
from jaxformer.tokenizers import Tokenizer, require_own


@dataclass(frozen=True)
class BeamConfig:
    """How to search. Vaswani et al. 2017, section 6.1: width 4, alpha 0.6, source length + 50.

    `alpha` is the exponent of the length penalty (that of the `Manner`: by default GNMT's),
    `extra_length` how many tokens a translation may be longer than its source, `rows` how many
    sentences one program decodes at most.
    Raises `ConfigError` for less than one of what is counted.
    """

    width: int = 4
    alpha: float = 0.6
    extra_length: int = 50
    rows: int = 64

    def __post_init__(self):
        check_least(self, 1, "width", "rows")
        check_least(self, 0, "extra_length")


class Translation(NamedTuple):
    """One hypothesis: its text, its penalised score, its ids and their log-probabilities.

    The ids and the log-probabilities (nats) include the end token.
    """

    text: str
    score: float
    ids: list[int]
    log_probs: list[float]


@partial(jax.jit, static_argnames=("model", "width", "alpha", "length", "manner"))
def decode(
    model: EncoderDecoder,
    params: Any,
    source: jax.Array,
    limits: jax.Array,
    *,
    width: int,
    alpha: float,
    length: int,
    manner: Manner = OWN,
) -> Hypotheses:
    """The `width` best translations of each of `source` [B, S] (padded with `manner.pad`).

    Translation b has at most `limits[b]` <= `length` ids. A pure function: it can be jitted,
    vmapped (over an ensemble's `params`) and exported.
    """
    cache = model.apply(
        {"params": params},
        source,
        source != manner.pad,
        length=length,
        hypotheses=width,
        method="start",
    )
    first = jax.numpy.full(source.shape[:1], manner.start, jax.numpy.int32)
    return beam_search(
        step_function(model, params),
        cache,
        first,
        limits,
        width=width,
        length=length,
        end=manner.ends,
        penalty=manner.penalty(alpha),
        stop=manner.stop,
        outlook=manner.outlook,
        limit=manner.limit,
        spare=width * len(manner.ends) if manner.twice else 0,
        rules=manner.rules(),
        logit_rules=manner.logit_rules(),
    )


def translate(
    model: EncoderDecoder,
    params: Any,
    lines: Sequence[str],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    search: BeamConfig = BeamConfig(),
    *,
    manner: Manner = OWN,
) -> list[list[Translation]]:
    """The `search.width` best translations of each line, best first.

    A blank line gives one empty translation. Lines are sorted by length and decoded together in
    a few shapes (16, 32, 64, ... ids), one program each, two at a time on a CPU; what a line gives
    depends on no other line. `manner` is that of a model from elsewhere. Raises `DataError` for a
    line of more than `max_len` ids.
    """
    sentences = encode_sources(model, lines, source_tokenizer, manner)
    count = concurrency(params)
    rows = share(sum(map(bool, sentences)), count, search.rows)
    batches = list(_batches(sentences, model.config, search, manner, rows))
    runs = (_run(model, params, batch, search, manner) for batch in batches)
    results = [[Translation("", 0.0, [], [])] for _ in lines]
    for batch, found in zip(batches, concurrently(runs, count), strict=True):
        for row, number in enumerate(batch.numbers):
            limit = min(int(batch.limits[row]), batch.length)
            results[number] = _translations(found, row, target_tokenizer, manner, limit)
    return results


class _Batch(NamedTuple):
    """`source` [rows, S], `limits` [rows] of at most `length` ids; which lines the rows are."""

    numbers: list[int]
    source: np.ndarray
    limits: np.ndarray
    length: int


def _run(
    model: EncoderDecoder, params: Any, batch: _Batch, search: BeamConfig, manner: Manner
) -> Callable[[], Hypotheses]:
    """The decoding of `batch`, compiled and to be run."""
    sizes = {"width": search.width, "alpha": search.alpha, "length": batch.length}
    compiled = decode.lower(
        model, params, batch.source, batch.limits, manner=manner, **sizes
    ).compile()
    return lambda: jax.device_get(compiled(params, batch.source, batch.limits))


def room(
    config: TransformerConfig, source_length: int, extra_length: int, longest: int | None = None
) -> int:
    """How many ids a translation may have; learned positions end at `max_len`."""
    wanted = source_length + extra_length if longest is None else longest
    return min(wanted, config.max_len) if config.positions == "learned" else wanted


def too_long(
    model: EncoderDecoder, lines: Sequence[str], tokenizer: Tokenizer, manner: Manner = OWN
) -> list[int]:
    """The indices of the lines of more than `max_len` ids, which the model cannot take."""
    lengths = map(len, _encode(lines, tokenizer, manner))
    return [i for i, length in enumerate(lengths) if length > model.config.max_len]


def encode_sources(
    model: EncoderDecoder, lines: Sequence[str], tokenizer: Tokenizer, manner: Manner = OWN
) -> list[list[int]]:
    """Each line's ids and the end token; nothing for a blank line.

    Raises `DataError`, naming the first such line, for lines of more than `max_len` ids, and
    without another `manner` for a vocabulary whose special tokens stand elsewhere than in those
    trained here.
    """
    sentences = _encode(lines, tokenizer, manner)
    limit = model.config.max_len
    long = [i for i, sentence in enumerate(sentences) if len(sentence) > limit]
    if long:
        raise DataError(
            f"{len(long)} of {len(lines)} lines are longer than max_len={limit} tokens, the "
            f"first is line {long[0] + 1} with {len(sentences[long[0]])}: split them"
        )
    return sentences


def _encode(lines: Sequence[str], tokenizer: Tokenizer, manner: Manner) -> list[list[int]]:
    ids = (require_own(tokenizer) if manner == OWN else tokenizer).encode_batch(lines)
    return [x + [manner.end] if line.strip() else [] for x, line in zip(ids, lines, strict=True)]


@partial(jax.jit, static_argnames="model")
def _forced(model: EncoderDecoder, params: Any, source: jax.Array, target: jax.Array):
    logits = model.apply({"params": params}, source, target[:, :-1], source != OWN.pad)
    return token_log_probs(logits, target[:, 1:])


def score_pairs(
    model: EncoderDecoder,
    params: Any,
    pairs: Sequence[tuple[str, str]],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    *,
    rows: int = 64,
) -> list[list[float]]:
    """The log-probability (nats) of each target token, the end token last, given its source.

    Their sum is the log-probability of the target; a pair with a blank side has none. Raises
    `DataError` for a pair with a side of more than `max_len` ids.
    """
    sources = encode_sources(model, [pair[0] for pair in pairs], source_tokenizer)
    targets = encode_sources(model, [pair[1] for pair in pairs], target_tokenizer)
    limit = model.config.max_len
    results: list[list[float]] = [[] for _ in pairs]
    sides = zip(sources, targets, strict=True)
    lengths = [max(len(a), len(b)) if a and b else 0 for a, b in sides]
    for chosen, size in groups(lengths, limit, rows):
        source = pad([sources[i] for i in chosen], rows, size)
        target = pad([[OWN.start, *targets[i]] for i in chosen], rows, size + 1)
        found = np.asarray(_forced(model, params, source, target))
        for row, number in enumerate(chosen):
            results[number] = found[row, : len(targets[number])].tolist()
    return results


def _translations(
    found: Hypotheses, row: int, tokenizer: Tokenizer, manner: Manner, limit: int
) -> list[Translation]:
    translations = []
    for tokens, score, log_probs in zip(*(leaf[row] for leaf in found), strict=True):
        if score == -np.inf:
            continue
        ends = np.flatnonzero(np.isin(tokens, manner.ends))
        count = int(ends[0]) + 1 if ends.size else limit
        ids = tokens[:count].tolist()
        text = tokenizer.decode(ids)
        translations.append(Translation(text, float(score), ids, log_probs[:count].tolist()))
    return translations


def _batches(
    sentences: list[list[int]],
    config: TransformerConfig,
    search: BeamConfig,
    manner: Manner,
    rows: int,
) -> Iterator[_Batch]:
    """`sentences` in batches of `rows`, the longest last."""
    for numbers, size in groups([len(s) for s in sentences], config.max_len, rows):
        limits = np.ones(rows, np.int32)
        own = [len(sentences[i]) + search.extra_length for i in numbers]
        limits[: len(numbers)] = own if manner.longest is None else manner.longest
        source = pad([sentences[i] for i in numbers], rows, size, manner.pad)
        length = room(config, size, search.extra_length, manner.longest)
        yield _Batch(numbers, source, limits, length)
