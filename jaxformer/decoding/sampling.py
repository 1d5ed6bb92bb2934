"""Sampling: one continuation per text, each token drawn from the step's logits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxformer.decoding.generation_config import SamplingConfig
from jaxformer.decoding.hypotheses import (
    AnyArray,
    Hypotheses,
    Step,
    append_tokens,
    check_logits,
    compile_once,
    empty_hypotheses,
    is_among,
)
from jaxformer.decoding.logits_processors import (
    DecodeHistory,
    LogitsProcessor,
    apply_all,
    no_repeat_ngram,
    repetition_penalty,
)
from jaxformer.decoding.samplers import Sampler, make_sampler
from jaxformer.ops.cross_entropy import token_log_probs

StopFn = Callable[[Int[Array, ""], Int[Array, " B"]], Bool[Array, " B"]]
"""stop_fn(index, tokens [B]) -> stop [B]; traced with the loop and called after every token."""


class Prompts(NamedTuple):
    """B texts to continue, whose tokens before the last are in the cache.

    >>> two = Prompts(np.array([7, 9]), max_lengths=np.array([5, 3]), example_ids=np.array([0, 1]))
    >>> two.step_offset, two.token_counts
    (0, None)
    """

    last_tokens: Int[AnyArray, " B"]
    """The last token of each prompt."""
    max_lengths: Int[AnyArray, " B"]
    """The most tokens of each continuation; below 1 there is none."""
    example_ids: Int[AnyArray, " B"]
    """A number for each text; with the rng and a token's index it decides what is drawn."""
    step_offset: Int[AnyArray, ""] | np.integer | int = 0
    """How many tokens earlier calls added to the texts: the index of the first new one."""
    token_counts: Int[AnyArray, "B V"] | None = None
    """How often each text holds each token, for the logits processors; None: zeros."""


def sample(
    step: Step,
    cache: Any,
    prompts: Prompts,
    rng: Key[Array, ""],
    config: SamplingConfig = SamplingConfig(),
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop_fn: StopFn | None = None,
) -> Hypotheses:
    """One continuation of each prompt (W = 1) of at most `config.max_new_tokens` tokens.

    A text ends with a token of `config.eos` (None: no token ends it), at its maximum length, or
    when `stop_fn` says so. `sampler` replaces the one that `config` describes. `logits_processors`
    follow the repetition penalty of `config` and precede its `no_repeat_ngram_size`. A text depends
    on `rng`, its `example_ids` and the indices of its tokens, not on the batch. Scores and
    log-probabilities are the model's own, before any processor. `config.stop`, `overflow` and
    `seed` are not used here.

    Eager calls compile as those of `beam_search`. Raises `ValueError` for shapes that do not fit.

    >>> def step(tokens, cache):  # the token after t is t + 1
    ...     return jax.nn.one_hot(tokens + 1, 9), cache
    >>> ids = jnp.array([0, 1])
    >>> prompts = Prompts(jnp.array([1, 4]), max_lengths=jnp.array([3, 3]), example_ids=ids)
    >>> config = jf.SamplingConfig(max_new_tokens=3, temperature=0.0, eos=(6,))
    >>> jf.sample(step, None, prompts, jax.random.key(0), config).tokens[:, 0]  # [B, L]
    Array([[2, 3, 4],
           [5, 6, 0]], dtype=int32)
    """
    shape = prompts.last_tokens.shape
    if len(shape) != 1:
        raise ValueError(f"last_tokens has shape {shape}, but must be [B]: one token per prompt")
    for name in ("max_lengths", "example_ids"):
        given = getattr(prompts, name).shape
        if given != shape:
            raise ValueError(f"{name} has shape {given}, but must be {shape}, like last_tokens")
    settings = _Settings(config, sampler, tuple(logits_processors), stop_fn)
    return _sample(settings, step, cache, prompts, rng)


class _Settings(NamedTuple):
    """What a compiled loop depends on besides shapes."""

    config: SamplingConfig
    sampler: Sampler | None
    logits_processors: tuple[LogitsProcessor, ...]
    stop_fn: StopFn | None


class _Texts(NamedTuple):
    length: Int[Array, ""]  # how many tokens are written
    stopped: Bool[Array, " B"]
    last: Int[Array, " B"]
    written: Hypotheses
    token_counts: Int[Array, "B V"] | None
    cache: Any


@compile_once
def _sample(
    settings: _Settings, step: Step, cache: Any, prompts: Prompts, rng: Key[Array, ""]
) -> Hypotheses:
    config, sampler, processors, stop_fn = settings
    sampler = make_sampler(config) if sampler is None else sampler
    eos = config.eos or ()
    if config.repetition_penalty != 1:
        processors = (repetition_penalty(config.repetition_penalty), *processors)
    if config.no_repeat_ngram_size:
        processors = (*processors, no_repeat_ngram(config.no_repeat_ngram_size))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, prompts.example_ids)
    written = empty_hypotheses(len(prompts.last_tokens), 1, config.max_new_tokens)
    written = written._replace(scores=jnp.zeros_like(written.scores))

    def unfinished(texts):
        return (texts.length < config.max_new_tokens) & ~texts.stopped.all()

    def advance(texts):
        index, stopped, last, written, counts, cache = texts
        logits, cache = step(last[:, None], cache)
        check_logits(logits, last[:, None], eos)
        logits = logits[:, 0].astype(jnp.float32)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, prompts.step_offset + index)
        drawn = jax.vmap(sampler)(_apply(processors, logits, texts), step_keys)
        token = jnp.where(stopped, 0, drawn)
        added = jnp.where(stopped, 0.0, token_log_probs(logits, token))
        written = append_tokens(written, token[:, None], added[:, None], index)
        stopped |= index + 1 >= prompts.max_lengths
        if eos:
            stopped |= is_among(token, eos)
        if stop_fn is not None:
            stopped |= stop_fn(index, token)
        if counts is not None:
            counts = counts.at[jnp.arange(len(token)), token].add(1)
        return _Texts(index + 1, stopped, token, written, counts, cache)

    counts = _initial_counts(step, cache, prompts) if processors else None
    length, last = jnp.zeros((), jnp.int32), jnp.asarray(prompts.last_tokens, jnp.int32)
    stopped = jnp.asarray(prompts.max_lengths) < 1
    texts = _Texts(length, stopped, last, written, counts, cache)
    return jax.lax.while_loop(unfinished, advance, texts).written


def _initial_counts(step: Step, cache: Any, prompts: Prompts) -> Int[Array, "B V"]:
    """`prompts.token_counts`, or zeros."""
    logits, _ = jax.eval_shape(step, prompts.last_tokens[:, None], cache)
    shape, counts = (logits.shape[0], logits.shape[-1]), prompts.token_counts
    if counts is None:
        return jnp.zeros(shape, jnp.int32)
    if counts.shape != shape:
        raise ValueError(f"token_counts has shape {counts.shape}, but must be [B, V] {shape}")
    return jnp.asarray(counts)


def _apply(
    processors: Sequence[LogitsProcessor], logits: Float[Array, "B V"], texts: _Texts
) -> Float[Array, "B V"]:
    """`logits` after each of `processors` in turn."""
    if texts.token_counts is None:
        return logits

    def process(logits, counts, tokens):
        return apply_all(processors, logits, DecodeHistory(counts, tokens, texts.length))

    return jax.vmap(process)(logits, texts.token_counts, texts.written.tokens[:, 0])
