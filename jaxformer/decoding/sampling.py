"""Sampling: one continuation of each sentence, each token picked from the step's logits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.decoding.hypotheses import (
    Hypotheses,
    Step,
    append,
    are_among,
    check_logits,
    check_sizes,
    empty,
)
from jaxformer.decoding.picks import Pick
from jaxformer.decoding.rules import Rule, Written
from jaxformer.losses import token_log_probs

Watch = Callable[[jax.Array, jax.Array], jax.Array]
"""watch(index, tokens [B]) -> stop [B] bool, traced with the loop and called after every token."""


class _Texts(NamedTuple):
    index: jax.Array  # how many tokens are done
    stopped: jax.Array  # [B]
    last: jax.Array  # [B]
    written: Hypotheses
    seen: jax.Array | None  # [B, V]
    cache: Any


def sample(
    step: Step,
    cache: Any,
    first: jax.Array,
    limits: jax.Array,
    rng: jax.Array,
    rows: jax.Array,
    *,
    pick: Pick,
    length: int,
    end: int | Sequence[int] | None,
    rules: Sequence[Rule] = (),
    seen: jax.Array | None = None,
    watch: Watch | None = None,
    made: jax.Array | int = 0,
) -> Hypotheses:
    """One continuation of each sentence (W = 1), each token chosen by `pick` after all `rules`.

    As `beam_search`, but at a sentence's limit the text is cut rather than ended, and without an
    `end` nothing else ends it but `watch`. `rules` change the logits. A token's randomness is keyed
    by `rng`, its sentence's number `rows` [B] and its position, counted from `made`, so that a text
    does not depend on its batch. `seen` [B, V] int32 counts the tokens that the rules find before
    the first. Scores are sums of the model's own log-probabilities, before any rule.
    """
    check_sizes(first, limits, 1, length)
    if rows.shape != first.shape:
        raise ValueError(f"rows has shape {rows.shape}, but must be {first.shape}, like first")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, rows)
    written = empty(first.shape[0], 1, length)
    written = written._replace(scores=jnp.zeros_like(written.scores))

    def unfinished(texts):
        return (texts.index < length) & ~texts.stopped.all()

    def advance(texts):
        index, stopped, last, written, seen, cache = texts
        logits, cache = step(last[:, None], cache)
        check_logits(logits, last[:, None], 0 if end is None else end)
        logits = logits[:, 0].astype(jnp.float32)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, made + index)
        picked = jax.vmap(pick)(_ruled(logits, rules, texts), now)
        token = jnp.where(stopped, 0, picked)
        added = jnp.where(stopped, 0.0, token_log_probs(logits, token))
        written = append(written, token[:, None], added[:, None], index)
        stopped |= index + 1 >= limits
        if end is not None:
            stopped |= are_among(token, end)
        if watch is not None:
            stopped |= watch(index, token)
        return _Texts(index + 1, stopped, token, written, _counted(seen, token), cache)

    seen = _first_seen(step, cache, first, seen) if rules else None
    index = jnp.zeros((), jnp.int32)
    start = _Texts(index, limits < 1, first.astype(jnp.int32), written, seen, cache)
    return jax.lax.while_loop(unfinished, advance, start).written


def _first_seen(step: Step, cache: Any, first: jax.Array, seen: jax.Array | None) -> jax.Array:
    """`seen`, or as many zeros [B, V] as the step makes logits."""
    logits, _ = jax.eval_shape(step, first[:, None], cache)
    shape = first.shape[0], logits.shape[-1]
    if seen is None:
        return jnp.zeros(shape, jnp.int32)
    if seen.shape != shape:
        raise ValueError(f"seen has shape {seen.shape}, but must be [B, V] {shape}: counts of ids")
    return seen


def _ruled(logits: jax.Array, rules: Sequence[Rule], texts: _Texts) -> jax.Array:
    """`logits` [B, V] after one rule after another."""
    held = Written(texts.seen, texts.written.tokens[:, 0], texts.index)
    for rule in rules:
        logits = jax.vmap(rule, (0, Written(0, 0, None)))(logits, held)
    return logits


def _counted(seen: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
    """`seen` [B, V] with one more of each of `tokens` [B]."""
    return None if seen is None else seen.at[jnp.arange(len(tokens)), tokens].add(1)
