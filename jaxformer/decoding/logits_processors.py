"""Logits processors: functions that change the logits before a token is chosen."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding.settings import LogitsConfig


class DecodeHistory(NamedTuple):
    """The text so far, as a logits processor sees it.

    >>> def forbid_repeats(logits, history):
    ...     return jnp.where(history.token_counts > 0, -jnp.inf, logits)
    >>> tokens, counts = jnp.array([1, 2, 1, 0]), jnp.array([0, 2, 1])
    >>> forbid_repeats(jnp.zeros(3), DecodeHistory(tokens, 3, 1, counts))
    Array([  0., -inf, -inf], dtype=float32)
    """

    tokens: Int[Array, " L"]
    """The tokens of the prompt (of a search, the token before the text) and of its continuation;
    only the first `length` are written."""
    length: Int[Array, ""] | int
    """The number of tokens that are written."""
    prompt_length: Int[Array, ""] | int
    """The number of them that are the prompt's."""
    token_counts: Int[Array, " V"]
    """The number of times that they include each token."""


LogitsProcessor = Callable[[Float[Array, " V"], DecodeHistory], Float[Array, " V"]]
"""processor(logits [V], history) -> logits [V], for one text."""


def apply_all(
    processors: Sequence[LogitsProcessor],
    logits: Float[Array, "R V"],
    tokens: Int[Array, "R L"],
    lengths: Int[Array, " R"],
    prompt_lengths: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """`logits` of R texts after each of `processors` in turn; for the rest see `DecodeHistory`."""
    if not processors:
        return logits
    counts = _token_counts(logits, tokens, lengths)

    def process(logits, *history):
        for processor in processors:
            logits = processor(logits, DecodeHistory(*history))
        return logits

    return jax.vmap(process)(logits, tokens, lengths, prompt_lengths, counts)


def penalize(
    logits: Float[Array, "R V"],
    penalties: Float[Array | np.ndarray, " R"],
    tokens: Int[Array, "R L"],
    lengths: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """`logits` after the `repetition_penalty` of each text, at no cost where all are 1.

    A positive logit of a token that the text holds is divided by it, a negative one multiplied, as
    in the code of Keskar et al. 2019 (section 4.1).
    """

    def lowered() -> Float[Array, "R V"]:
        by = penalties[:, None]
        lower = jnp.where(logits > 0, logits / by, logits * by)
        return jnp.where(_token_counts(logits, tokens, lengths) > 0, lower, logits)

    return jax.lax.cond((penalties != 1).any(), lowered, lambda: logits)


def forbid_eos(
    logits: Float[Array, "R V"], early: Bool[Array, " R"], eos: Sequence[int]
) -> Float[Array, "R V"]:
    """`logits` without the tokens `eos` in the `early` rows, whose texts are too short."""
    is_eos = jnp.isin(jnp.arange(logits.shape[1]), np.asarray(eos, np.int32))
    return jnp.where(early[:, None] & is_eos[None], -jnp.inf, logits)


def _token_counts(
    logits: Float[Array, "R V"], tokens: Int[Array, "R L"], lengths: Int[Array, " R"]
) -> Int[Array, "R V"]:
    written = (np.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
    rows = np.arange(len(tokens))[:, None]
    return jnp.zeros(logits.shape, jnp.int32).at[rows, tokens].add(written)


def force_token_at(token: int, index: int = 0) -> LogitsProcessor:
    """Makes `token` the only one possible where the continuation has `index` tokens.

    Its logit becomes 0, the others' -inf: as a log-probability it costs nothing. Raises
    `ValueError` for a token outside the vocabulary.
    """

    def process(logits, history):
        _check_tokens([token], logits.size)
        only = jnp.full_like(logits, -jnp.inf).at[token].set(0.0)
        return jnp.where(history.length - history.prompt_length == index, only, logits)

    return process


def renormalize(logits: Float[Array, " V"], history: DecodeHistory) -> Float[Array, " V"]:
    """A processor that makes log-probabilities of the logits, which add up to one again."""
    return jax.nn.log_softmax(logits)


def suppress_tokens(ids: Sequence[int]) -> LogitsProcessor:
    """Never writes a token of `ids`; `ValueError` for one outside the vocabulary, and for all.

    >>> begun = DecodeHistory(jnp.array([1, 0]), 1, 1, jnp.array([0, 1, 0]))
    >>> suppress_tokens([0])(jnp.array([3.0, 2.0, 1.0]), begun)
    Array([-inf,   2.,   1.], dtype=float32)
    """
    suppressed = np.asarray(ids, np.int32)

    def process(logits, history):
        _check_tokens(ids, logits.size)
        if len(set(ids)) >= logits.size:
            raise ValueError(f"all {logits.size} tokens are suppressed: leave at least one")
        return logits.at[suppressed].set(-jnp.inf)

    return process


def no_repeat_ngram(size: int) -> LogitsProcessor:
    """Never writes a token that would repeat `size` consecutive tokens of the text.

    Paulus et al. 2018, section 2.5, with size 3. Raises `ValueError` if size < 1.

    >>> history = DecodeHistory(jnp.array([1, 2, 1, 0]), 3, 1, jnp.array([0, 2, 1]))
    >>> no_repeat_ngram(2)(jnp.zeros(3), history)  # 1 2 occurs in 1 2 1, so 2 is excluded
    Array([  0.,   0., -inf], dtype=float32)
    """
    if size < 1:
        raise ValueError(f"size={size}, but it must be at least 1")

    def process(logits, history):
        tokens, length, _, _ = history
        starts = np.arange(max(0, tokens.size - size + 1))
        runs = tokens[starts[:, None] + np.arange(size)]  # [runs, size]
        last = jax.lax.dynamic_slice(tokens, [length - (size - 1)], [min(size - 1, tokens.size)])
        same = (runs[:, : last.size] == last[None]).all(axis=-1) & (starts + size <= length)
        repeated = jnp.zeros(logits.shape, bool).at[runs[:, -1]].max(same)
        return jnp.where(repeated, -jnp.inf, logits)

    return process


def make_constraints(config: LogitsConfig) -> list[LogitsProcessor]:
    """The processors of `config` that forbid tokens, whatever the scale of the logits is."""
    constraints = []
    if config.no_repeat_ngram_size:
        constraints.append(no_repeat_ngram(config.no_repeat_ngram_size))
    if config.suppress_tokens:
        constraints.append(suppress_tokens(config.suppress_tokens))
    return constraints


def _check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"tokens {outside} are not in the vocabulary: give ids from 0 to {vocab_size - 1}"
        )
