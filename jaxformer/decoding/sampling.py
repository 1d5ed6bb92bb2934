"""Sampling: one continuation per text, each token drawn from the step's logits."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxformer.decoding.hypotheses import (
    AnyArray,
    Hypotheses,
    Step,
    append_tokens,
    check_batch,
    check_logits,
    compile_once,
    empty_hypotheses,
    is_among,
)
from jaxformer.decoding.logits_processors import LogitsProcessor, apply_all, make_processors
from jaxformer.decoding.queue import run_to_end
from jaxformer.decoding.settings import SamplerConfig, SamplingConfig
from jaxformer.ops.cross_entropy import token_log_probs
from jaxformer.ops.top_k import top_k

Sampler = Callable[[Float[Array, " V"], Key[Array, ""]], Int[Array, ""]]
"""sampler(logits [V], rng) -> the token, int32."""

StopFn = Callable[[Int[Array, ""], Int[Array, "B L"]], tuple[Bool[Array, " B"], Int[Array, ""]]]
"""stop_fn(length, tokens [B, L]) -> (stop [B], the length at which it is called again).

It is traced with the loop. The first `length` tokens of each text are written, at first one.
"""


def greedy(logits: Float[Array, " V"], rng: Key[Array, ""]) -> Int[Array, ""]:
    """The most likely token."""
    return jnp.argmax(logits).astype(jnp.int32)


def make_sampler(config: SamplerConfig) -> Sampler:
    """The sampler that `config` describes: draws from the tokens that all its limits keep.

    `top_p` refers to the probabilities, at the temperature, among the `top_k` most likely tokens
    (Holtzman et al. 2020), `min_p` to that of the most likely one (Nguyen et al. 2024). At least
    one token is kept; of equally likely tokens those with the lower ids are.

    >>> sampler = make_sampler(jf.SamplingConfig(top_k=2, top_p=0.5))
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> int(sampler(logits, jax.random.key(0)))  # 0.5 / (0.5 + 0.4) is more than top_p
    0
    """
    if config.temperature == 0:
        return greedy
    least = math.log(config.min_p) if config.min_p else -math.inf

    def sampler(logits, rng):
        # Relative to the largest logit, so that a very low temperature makes no infinity.
        logits = (logits - logits.max()) / config.temperature
        if config.top_k == 0 and config.top_p == 1.0:
            kept = jnp.where(logits >= least, logits, -jnp.inf)
            return jax.random.categorical(rng, kept).astype(jnp.int32)
        ranked, tokens = top_k(logits, min(config.top_k or logits.size, logits.size))
        kept = ranked >= least
        if config.top_p < 1.0:
            shares = jax.nn.softmax(ranked)
            kept &= jnp.cumsum(shares) - shares < config.top_p
        index = jax.random.categorical(rng, jnp.where(kept, ranked, -jnp.inf))
        return tokens[index].astype(jnp.int32)

    return sampler


class Prompts(NamedTuple):
    """B texts to continue, whose tokens before the last are in the cache."""

    last_tokens: Int[AnyArray, " B"]
    """The last token of each prompt."""
    max_new_tokens: Int[AnyArray, " B"]
    """The most tokens of each continuation; below 1 there is none."""
    example_ids: Int[AnyArray, " B"]
    """A number for each text; with the rng and a token's index it decides what is drawn."""
    step_offset: Int[AnyArray, ""] | np.integer | int = 0
    """The number of tokens that earlier calls added: the index of the first new one."""
    history: Int[AnyArray, "B P"] | None = None
    """The tokens of each text so far, the last one too, for the logits processors; those at its
    end are padding. None: the last token alone."""
    history_lengths: Int[AnyArray, " B"] | None = None
    """The number of tokens of `history` that are no padding; None: all."""


def sample(
    step: Step,
    cache: Any,
    prompts: Prompts,
    rng: Key[Array, ""],
    config: SamplingConfig = SamplingConfig(),
    *,
    eos: tuple[int, ...] = (),
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop_fn: StopFn | None = None,
) -> Hypotheses:
    """One continuation of each prompt (W = 1) of at most `config.max_new_tokens` tokens.

    A text ends with a token of `eos`, at its maximum length, or when `stop_fn` says so. `sampler`
    replaces the one that `config` describes. `logits_processors` follow the repetition penalty of
    `config` and precede its constraints. A text depends on `rng`, its `example_ids` and the
    indices of its tokens, not on the batch. Scores and log-probabilities are the model's own,
    before any processor. `cache` may be a `Queue` of the B texts, without `stop_fn`.

    Eager calls compile as those of `beam_search`. Raises `ValueError` for shapes that do not fit.

    >>> def step(tokens, cache):  # the token after t is t + 1
    ...     return jax.nn.one_hot(tokens + 1, 9), cache
    >>> ids = jnp.array([0, 1])
    >>> prompts = Prompts(jnp.array([1, 4]), max_new_tokens=jnp.array([3, 3]), example_ids=ids)
    >>> config = jf.SamplingConfig(max_new_tokens=3, temperature=0.0)
    >>> jf.sample(step, None, prompts, jax.random.key(0), config, eos=(6,)).tokens[:, 0]  # [B, L]
    Array([[2, 3, 4],
           [5, 6, 0]], dtype=int32)
    """
    shape = prompts.last_tokens.shape
    if len(shape) != 1:
        raise ValueError(f"last_tokens has shape {shape}, but must be [B]: one token per prompt")
    check_batch(prompts.last_tokens)
    for name in ("max_new_tokens", "example_ids", "history_lengths"):
        value = getattr(prompts, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}, but must be {shape}: [B]")
    history = prompts.history
    if history is not None and (history.ndim != 2 or history.shape[:1] != shape):
        raise ValueError(f"history has shape {history.shape}, but must be [B, P] with B={shape[0]}")
    return _sample(
        step,
        cache,
        prompts,
        rng,
        config=config,
        eos=tuple(eos),
        sampler=sampler,
        logits_processors=tuple(logits_processors),
        stop_fn=stop_fn,
    )


class _Texts(NamedTuple):
    limits: Int[Array, " B"]
    ids: Int[Array, " B"]  # the example ids
    begun: Int[Array, " B"]  # how many tokens are before those of this call
    length: Int[Array, " B"]  # how many tokens are written
    stopped: Bool[Array, " B"]
    last: Int[Array, " B"]
    written: Hypotheses
    whole: Int[Array, "B P+L"] | None  # prompts and what is written, if a processor sees them
    next_call: Int[Array, " B"]  # the length at which `stop_fn` is called
    cache: Any


@compile_once
def _sample(
    step: Step,
    cache: Any,
    prompts: Prompts,
    rng: Key[Array, ""],
    *,
    config: SamplingConfig,
    eos: tuple[int, ...],
    sampler: Sampler | None,
    logits_processors: tuple[LogitsProcessor, ...],
    stop_fn: StopFn | None,
) -> Hypotheses:
    sampler = make_sampler(config) if sampler is None else sampler
    penalties, constraints = make_processors(config, eos)
    processors = [*penalties, *logits_processors, *constraints]
    history, begun = _history(prompts)
    size = config.max_new_tokens
    whole = jnp.pad(history, ((0, 0), (0, size))) if processors else None

    def draw(logits, example_id, index):
        fold_in = jax.random.fold_in
        return sampler(logits, fold_in(fold_in(rng, example_id), index))

    def begin(texts, cache):
        last, limits, ids, begun, whole = texts
        written = empty_hypotheses(len(last), 1, size)
        written = written._replace(scores=jnp.zeros_like(written.scores))
        length, stopped = jnp.zeros_like(last), limits < 1
        fixed = limits, ids, begun
        return _Texts(*fixed, length, stopped, last, written, whole, length + 1, cache)

    def advance(texts):
        limits, ids, begun, index, stopped, last, written, whole, next_call, cache = texts
        logits, cache = step(last[:, None], cache)
        check_logits(logits, last[:, None], eos)
        logits = processed = logits[:, 0].astype(jnp.float32)
        lengths = begun + index
        if whole is not None:
            ends = begun - prompts.step_offset
            processed = apply_all(processors, logits, whole, lengths, ends)
        token = jax.vmap(draw)(processed, ids, prompts.step_offset + index)
        token = jnp.where(stopped, 0, token)
        added = jnp.where(stopped, 0.0, token_log_probs(logits, token))
        written = append_tokens(written, token[:, None], added[:, None], index)
        stopped |= index + 1 >= limits
        if eos:
            stopped |= is_among(token, eos)
        if stop_fn is not None:  # without a queue: all rows have written as many tokens
            stop, next_length = jax.lax.cond(
                index[0] + 1 == next_call[0],
                partial(stop_fn, index[0] + 1, written.tokens[:, 0]),
                lambda: (jnp.zeros_like(stopped), next_call[0]),
            )
            stopped, next_call = stopped | stop, jnp.full_like(next_call, next_length)
        if whole is not None:
            whole = whole.at[jnp.arange(len(token)), lengths].set(token)
        fixed = limits, ids, begun
        return _Texts(*fixed, index + 1, stopped, token, written, whole, next_call, cache)

    last, limits = (jnp.asarray(x, jnp.int32) for x in prompts[:2])
    texts = last, jnp.minimum(limits, size), jnp.asarray(prompts.example_ids), begun, whole
    return run_to_end(begin, advance, texts, cache, attrgetter("written"))


def _history(prompts: Prompts) -> tuple[Int[Array, "B P"], Int[Array, " B"]]:
    """The tokens of each text so far, padded at the end, and how many they are."""
    tokens, lengths = prompts.history, prompts.history_lengths
    if tokens is None:
        tokens = prompts.last_tokens[:, None]
    if lengths is None:
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1])
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
