"""What a model knows of a text: how likely it is, what is missing, which vectors it gives it."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.config import ConfigError
from jaxformer.data import DataError
from jaxformer.generation.batches import check_fit, groups, pad, power_of_two
from jaxformer.heads import MaskedLanguageModel
from jaxformer.losses import token_log_probs
from jaxformer.metrics import Likelihood, count_text
from jaxformer.models import DecoderOnly, EncoderOnly
from jaxformer.tokenizers import Tokenizer

_ROWS = 64
# With GPT-2's vocabulary so many tokens have 0.4 GB of logits.
_TOKENS = 2048


class Candidate(NamedTuple):
    """What may stand for a mask: the vocabulary's token, its text, its probability."""

    token: str
    text: str
    probability: float


class Embedded(NamedTuple):
    """The T tokens of a text and their vectors.

    `learned` [T, D]: each token's row of the table, the same in every text; `contextual` [T, D]:
    what the model makes of it in this one; `pooled` [D]: their mean.
    """

    tokens: list[str]
    learned: np.ndarray
    contextual: np.ndarray
    pooled: np.ndarray


def likelihood(
    model: DecoderOnly,
    params: Any,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    stride: int | None = None,
) -> list[Likelihood]:
    """How likely each text is to the model, after the vocabulary's begin token.

    Without such a token a text's first one is taken as given and not counted. A longer text is
    read in windows of `max_len` tokens that begin `stride` after each other (None: `max_len`), so
    that each token but a text's first ones has at least `max_len - stride` before it. Raises
    `ConfigError` for another stride or a tokenizer that does not fit the model.
    """
    check_fit(model, tokenizer)
    limit = model.config.max_len
    stride = limit if stride is None else stride
    if not 1 <= stride <= limit:
        raise ConfigError(f"stride={stride}, but it must be 1 to max_len={limit}")
    begin = [] if tokenizer.special.bos is None else [tokenizer.special.bos]
    ids = [begin + text for text in tokenizer.encode_batch(texts)]
    windows = [(i, *window) for i, x in enumerate(ids) for window in _windows(x, limit, stride)]
    nats: list[list[float]] = [[] for _ in texts]
    for chosen, size in _small_groups([len(window) - 1 for _, window, _ in windows], limit):
        rows = power_of_two(len(chosen))
        tokens = pad([windows[i][1] for i in chosen], rows, size + 1)
        log_probs = np.asarray(_log_probs(model, params, tokens))
        for row, i in enumerate(chosen):
            number, window, known = windows[i]
            nats[number] += (-log_probs[row, known : len(window) - 1]).tolist()
    amounts = [count_text([text]) for text in texts]
    return [Likelihood(math.fsum(x), len(x), *y) for x, y in zip(nats, amounts, strict=True)]


def fill_mask(
    model: MaskedLanguageModel,
    params: Any,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    count: int = 5,
) -> list[list[list[Candidate]]]:
    """For each text and each mask in it the `count` likeliest tokens, likeliest first.

    A mask is written as the vocabulary's mask token, "<mask>" or "[MASK]", and stands for one
    token; where a space belongs to the token after it, so does the one before a mask. Raises
    `DataError` for a text without a mask or with more than `max_len` ids and for a vocabulary
    without a mask token, `ConfigError` for a tokenizer that does not fit the model.
    """
    check_fit(model, tokenizer)
    if count < 1:
        raise ConfigError(f"count={count}, but it must be at least 1")
    mask = tokenizer.special.mask
    if mask is None:
        raise DataError(
            "the vocabulary has no mask token: give the tokenizer of a masked language model"
        )
    ids = [_enclosed(masked_ids(text, i, tokenizer), tokenizer) for i, text in enumerate(texts)]
    _check_lengths(ids, model.config.max_len)
    places = [np.flatnonzero(np.array(x) == mask) for x in ids]
    results: list[list[list[Candidate]]] = [[] for _ in texts]
    best = partial(_fill, count=count, known=tokenizer.vocab_size)
    for chosen, size in groups([len(x) for x in ids], model.config.max_len, _ROWS):
        rows = power_of_two(len(chosen))
        tokens, present = _padded([ids[i] for i in chosen], rows, size)
        most = power_of_two(max(len(places[i]) for i in chosen))
        at = pad([places[i] for i in chosen], rows, most)
        shares, found = jax.device_get(best(model, params, tokens, present, at))
        for row, i in enumerate(chosen):
            masks = range(len(places[i]))
            results[i] = [_candidates(found[row, k], shares[row, k], tokenizer) for k in masks]
    return results


def embed(
    model: MaskedLanguageModel | EncoderOnly | DecoderOnly,
    params: Any,
    texts: Sequence[str],
    tokenizer: Tokenizer,
) -> list[Embedded]:
    """Each text's tokens with the vectors that the model has learned and makes of them.

    An encoder reads a text between the vocabulary's begin and end tokens, whose vectors are left
    out. Raises `DataError` for a text without tokens or of more than `max_len`, `ConfigError`
    for a tokenizer that does not fit the model.
    """
    check_fit(model, tokenizer)
    bare = tokenizer.encode_batch(texts)
    for number, ids in enumerate(bare, 1):
        if not ids:
            raise DataError(f"text {number} of {len(texts)} has no tokens: give it some text")
    causal = isinstance(model, DecoderOnly)
    whole = bare if causal else [_enclosed(ids, tokenizer) for ids in bare]
    first = 0 if causal or tokenizer.special.bos is None else 1
    _check_lengths(whole, model.config.max_len)
    results: dict[int, Embedded] = {}
    for chosen, size in groups([len(ids) for ids in whole], model.config.max_len, _ROWS):
        tokens, present = _padded([whole[i] for i in chosen], power_of_two(len(chosen)), size)
        learned, contextual = jax.device_get(_vectors(model, params, tokens, present))
        for row, i in enumerate(chosen):
            own = slice(first, first + len(bare[i]))
            vectors = learned[row, own], contextual[row, own], contextual[row, own].mean(axis=0)
            results[i] = Embedded([tokenizer.token(index) for index in bare[i]], *vectors)
    return [results[i] for i in range(len(texts))]


@partial(jax.jit, static_argnames="model")
def _log_probs(model: DecoderOnly, params: Any, tokens: jax.Array) -> jax.Array:
    """[B, T] for `tokens` [B, T + 1]."""
    return token_log_probs(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])


@partial(jax.jit, static_argnames=("model", "count", "known"))
def _fill(
    model: MaskedLanguageModel,
    params: Any,
    tokens: jax.Array,
    present: jax.Array,
    at: jax.Array,
    *,
    count: int,
    known: int,
) -> tuple[jax.Array, jax.Array]:
    """The `count` greatest probabilities [B, P, count] at `at` [B, P], and whose they are."""
    logits = model.apply({"params": params}, tokens, present, None, at).logits
    # A model may have more rows than its vocabulary has tokens.
    return jax.lax.top_k(jax.nn.softmax(logits[..., :known], axis=-1), min(count, known))


@partial(jax.jit, static_argnames="model")
def _vectors(model: nn.Module, params: Any, tokens: jax.Array, present: jax.Array):
    """The learned and the contextual vectors [B, T, D], float32."""

    def read(module):
        if isinstance(module, DecoderOnly):
            return module.embedding(tokens), module.hidden(tokens)
        encoder = module.encoder if isinstance(module, MaskedLanguageModel) else module
        return encoder.embedding(tokens), encoder(tokens, present).hidden

    vectors = model.apply({"params": params}, method=read)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), vectors)


def _windows(ids: list[int], limit: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Windows of up to limit + 1 ids, and how many labels of each are in the one before."""
    start = 0
    while start == 0 or start + limit - stride < len(ids) - 1:
        window = ids[start : start + limit + 1]
        if len(window) > 1:
            yield window, limit - stride if start else 0
        start += stride


def _small_groups(lengths: list[int], limit: int) -> Iterator[tuple[list[int], int]]:
    for chosen, size in groups(lengths, limit, _ROWS):
        rows = max(1, _TOKENS // size)
        for start in range(0, len(chosen), rows):
            yield chosen[start : start + rows], size


def masked_ids(text: str, number: int, tokenizer: Tokenizer) -> list[int]:
    """The ids of `text`, in which the mask's text is the mask and not a text that looks so."""
    mask = tokenizer.special.mask
    parts = text.split(tokenizer.token(mask))
    if len(parts) == 1:
        raise DataError(
            f"text {number + 1} has no mask: write {tokenizer.token(mask)} where a token is missing"
        )
    before, after = _spaces("".join(parts), tokenizer)
    ids: list[int] = []
    for i, part in enumerate(parts):
        if before and i < len(parts) - 1:
            part = part.removesuffix(" ")
        if after and i:
            part = part.removeprefix(" ")
        ids += [mask] * (i > 0) + tokenizer.encode(part)
    return ids


def _spaces(text: str, tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether the spaces before and after a mask in `text` are no tokens of their own."""
    words = text.split()[:_ROWS]
    single, spaced, pairs = (
        tokenizer.encode_batch([form.format(word) for word in words])
        for form in ("{0}", " {0}", "{0} {0}")
    )
    # Both where words come without spaces; the one before where a space begins a word's token.
    apart = all(pair == ids * 2 for pair, ids in zip(pairs, single, strict=True))
    joined = any(len(a) >= len(b) for a, b in zip(single, spaced, strict=True))
    return apart or joined, apart


def _enclosed(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids` between the begin and the end token, as far as the vocabulary has them."""
    special = tokenizer.special
    first, last = ([] if x is None else [x] for x in (special.bos, special.eos))
    return [*first, *ids, *last]


def _padded(texts: list[list[int]], rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`texts` as [rows, size], and where there is a token of theirs."""
    present = pad([[1] * len(text) for text in texts], rows, size) == 1
    return pad(texts, rows, size), present


def _check_lengths(texts: list[list[int]], limit: int) -> None:
    for number, ids in enumerate(texts, 1):
        if len(ids) > limit:
            raise DataError(
                f"text {number} of {len(texts)} has {len(ids)} tokens, but max_len={limit}: "
                "split it"
            )


def _candidates(ids: np.ndarray, shares: np.ndarray, tokenizer: Tokenizer) -> list[Candidate]:
    found = zip(ids.tolist(), tokenizer.decode_batch(ids[:, None]), shares.tolist(), strict=True)
    return [Candidate(tokenizer.token(i), text, share) for i, text, share in found]
