"""Logits processors: functions that change the logits before a token is chosen."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.generation_config import GenerationConfig


class DecodeHistory(NamedTuple):
    """The text so far, as a logits processor sees it.

    >>> def forbid_repeats(logits, history):
    ...     return jnp.where(history.token_counts > 0, -jnp.inf, logits)
    >>> counts, tokens, length = jnp.array([0, 2, 1]), jnp.array([1, 2, 1, 0]), jnp.array(3)
    >>> forbid_repeats(jnp.zeros(3), DecodeHistory(counts, tokens, length))
    Array([  0., -inf, -inf], dtype=float32)
    """

    token_counts: Int[Array, " V"]
    """How often the text holds each token, prompt included."""
    tokens: Int[Array, " L"]
    """The tokens of the continuation; only the first `length` are written."""
    length: Int[Array, ""]
    """How many tokens the continuation has."""


LogitsProcessor = Callable[[Float[Array, " V"], DecodeHistory], Float[Array, " V"]]
"""processor(logits [V], history) -> logits [V], for one text."""


def apply_all(
    processors: Sequence[LogitsProcessor], logits: Float[Array, " V"], history: DecodeHistory
) -> Float[Array, " V"]:
    """`logits` after each of `processors` in turn."""
    for processor in processors:
        logits = processor(logits, history)
    return logits


def repetition_penalty(penalty: float, before: Sequence[int] = ()) -> LogitsProcessor:
    """Makes every token that the text holds less likely (Keskar et al. 2019, section 4.1).

    A positive logit is divided by `penalty`, a negative one multiplied, as in the paper's code. The
    tokens `before` count as part of the text. Raises `ValueError` unless penalty > 0.

    >>> history = DecodeHistory(jnp.array([1, 0, 1]), jnp.array([0, 2, 0]), jnp.array(2))
    >>> repetition_penalty(2.0)(jnp.array([3.0, 3.0, -3.0]), history)
    Array([ 1.5,  3. , -6. ], dtype=float32)
    """
    first = np.asarray(before, np.int32)
    if not penalty > 0:
        raise ValueError(
            f"repetition_penalty {penalty} was given, but it must be positive: 1 is none"
        )

    def process(logits, history):
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(history.token_counts.at[first].add(1) > 0, lower, logits)

    return process


def force_token_at(token: int, index: int = 0) -> LogitsProcessor:
    """Makes `token` the only one possible where the text holds `index` tokens.

    Its logit becomes 0, the others' -inf: as a log-probability it costs nothing. Raises
    `ValueError` for a token outside the vocabulary.

    >>> empty = DecodeHistory(jnp.zeros(3, int), jnp.zeros(4, int), jnp.array(0))
    >>> force_token_at(2)(jnp.array([3.0, 2.0, 1.0]), empty)
    Array([-inf, -inf,   0.], dtype=float32)
    """

    def process(logits, history):
        if not 0 <= token < logits.size:
            raise ValueError(f"token {token} was forced, but there are only 0 to {logits.size - 1}")
        only = jnp.full_like(logits, -jnp.inf).at[token].set(0.0)
        return jnp.where(history.token_counts.sum() == index, only, logits)

    return process


def renormalize(logits: Float[Array, " V"], history: DecodeHistory) -> Float[Array, " V"]:
    """A processor that makes log-probabilities of the logits, which add up to one again.

    >>> empty = DecodeHistory(jnp.zeros(3, int), jnp.zeros(4, int), jnp.array(0))
    >>> jnp.exp(renormalize(jnp.array([1.0, 1.0, -jnp.inf]), empty)).round(4)
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    return jax.nn.log_softmax(logits)


def suppress_tokens(ids: Sequence[int]) -> LogitsProcessor:
    """Never writes a token of `ids`; `ValueError` for one outside the vocabulary.

    >>> empty = DecodeHistory(jnp.zeros(3, int), jnp.zeros(4, int), jnp.array(0))
    >>> suppress_tokens([0])(jnp.array([3.0, 2.0, 1.0]), empty)
    Array([-inf,   2.,   1.], dtype=float32)
    """
    suppressed = np.asarray(ids, np.int32)

    def process(logits, history):
        outside = [token for token in ids if not 0 <= token < logits.size]
        if outside:
            raise ValueError(
                f"tokens {outside} were suppressed, but there are only 0 to {logits.size - 1}"
            )
        return logits.at[suppressed].set(-jnp.inf)

    return process


def min_length(length: int, eos: Sequence[int]) -> LogitsProcessor:
    """Writes no token of `eos` before the continuation has `length` tokens.

    >>> history = DecodeHistory(jnp.array([1, 0, 0]), jnp.array([0, 0, 0]), jnp.array(1))
    >>> min_length(2, eos=[2])(jnp.array([3.0, 2.0, 1.0]), history)  # one token so far
    Array([  3.,   2., -inf], dtype=float32)
    """
    without_eos = suppress_tokens(eos)

    def process(logits, history):
        return jnp.where(history.length < length, without_eos(logits, history), logits)

    return process


def no_repeat_ngram(size: int, before: Sequence[int] = ()) -> LogitsProcessor:
    """Never writes a token that would repeat `size` consecutive tokens of the continuation.

    The tokens `before` count as the first of the continuation (Paulus et al. 2018, section 2.5,
    with size 3). Raises `ValueError` if size < 1.

    >>> history = DecodeHistory(jnp.array([0, 2, 1]), jnp.array([1, 2, 1, 0]), jnp.array(3))
    >>> no_repeat_ngram(2)(jnp.zeros(3), history)  # 1 2 occurs in 1 2 1, so 2 is excluded
    Array([  0.,   0., -inf], dtype=float32)
    """
    if size < 1:
        raise ValueError(f"no_repeat_ngram was given size={size}, but it must be at least 1")
    first = np.asarray(before, np.int32)

    def process(logits, history):
        tokens = jnp.concatenate([first, history.tokens])
        count = len(first) + history.length
        starts = np.arange(max(0, tokens.size - size + 1))
        runs = tokens[starts[:, None] + np.arange(size)]  # [runs, size]
        last = jax.lax.dynamic_slice(tokens, [count - (size - 1)], [min(size - 1, tokens.size)])
        same = (runs[:, : last.size] == last[None]).all(axis=-1) & (starts + size <= count)
        repeated = jnp.zeros(logits.shape, bool).at[runs[:, -1]].max(same)
        return jnp.where(repeated, -jnp.inf, logits)

    return process


def make_processors(
    config: GenerationConfig,
) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """The processors that `config` describes: penalties, and constraints that forbid tokens.

    >>> config = jf.GenerationConfig(repetition_penalty=1.2, suppress_tokens=(3,), min_length=5)
    >>> penalties, constraints = make_processors(config)
    >>> len(penalties), len(constraints)
    (1, 2)
    """
    before, penalties, constraints = [config.bos], [], []
    if config.repetition_penalty != 1:
        penalties.append(repetition_penalty(config.repetition_penalty, before))
    if config.no_repeat_ngram_size:
        constraints.append(no_repeat_ngram(config.no_repeat_ngram_size, before))
    if config.suppress_tokens:
        constraints.append(suppress_tokens(config.suppress_tokens))
    if config.min_length:
        constraints.append(min_length(config.min_length, config.eos))
    if config.forced_bos is not None:
        constraints.append(force_token_at(config.forced_bos))
    return penalties, constraints
