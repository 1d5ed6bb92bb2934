"""Beam search, its length penalties and its stopping rules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.decoding.hypotheses import (
    Hypotheses,
    Step,
    append,
    check_logits,
    check_sizes,
    empty,
    take,
)

Penalty = Callable[[jax.Array, jax.Array], jax.Array]
Stop = Callable[[jax.Array, jax.Array], jax.Array]


def gnmt(alpha: float) -> Penalty:
    """score = log p / ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14); length with end."""
    return lambda log_prob, length: log_prob / ((5.0 + length) / 6.0) ** alpha


def power(alpha: float) -> Penalty:
    """score = log p / length^alpha; 0 leaves the log-probability, 1 is its mean."""
    return lambda log_prob, length: log_prob / length**alpha


_PAPER_PENALTY = gnmt(0.6)  # Vaswani et al. 2017, section 6.1


def no_better(finished: jax.Array, bound: jax.Array) -> jax.Array:
    """Stop when no unfinished hypothesis can still beat the worst of the W finished ones."""
    return finished.min(axis=-1) >= bound


def first_full(finished: jax.Array, bound: jax.Array) -> jax.Array:
    """Stop when W hypotheses have finished, or none is left."""
    return (finished.min(axis=-1) > -jnp.inf) | (bound == -jnp.inf)


class _Beams(NamedTuple):
    index: jax.Array  # how many tokens are done
    stopped: jax.Array  # [B]
    last: jax.Array  # [B, W]
    live: Hypotheses  # unordered; scores are log-probabilities
    finished: Hypotheses
    cache: Any


def beam_search(
    step: Step,
    cache: Any,
    first: jax.Array,
    limits: jax.Array,
    *,
    width: int,
    length: int,
    end: int,
    penalty: Penalty = _PAPER_PENALTY,
    stop: Stop = no_better,
) -> Hypotheses:
    """The best continuations of each sentence that a beam of `width` hypotheses finds.

    `first` [B]: the token before the continuation. `limits` [B], at most `length` (the static
    size of the result): sentence b's continuation has at most `limits[b]` tokens, the last of
    which is `end`; below 1 there is none. A sentence's result depends on no other sentence, nor
    on `length`. Raises `ValueError` for sizes or logits that do not fit.
    """
    check_sizes(first, limits, width, length)
    limits = jnp.minimum(limits, length)
    none = empty(first.shape[0], width, length)
    last = jnp.broadcast_to(first.astype(jnp.int32)[:, None], (first.shape[0], width))
    live = none._replace(scores=none.scores.at[:, 0].set(0.0))
    beams = _Beams(jnp.zeros((), jnp.int32), limits < 1, last, live, none, cache)

    def unfinished(beams):
        return (beams.index < length) & ~beams.stopped.all()

    def advance(beams):
        logits, cache = step(beams.last, beams.cache)
        check_logits(logits, beams.last, end)
        extended, parents, tokens = _extend(beams, logits, beams.index + 1 >= limits, end)
        beams = _retire(beams._replace(live=extended), tokens == end, limits, penalty, stop)
        return beams._replace(last=tokens, cache=cache.select(parents))

    return jax.lax.while_loop(unfinished, advance, beams).finished


def _extend(
    beams: _Beams, logits: jax.Array, must_end: jax.Array, end: int
) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The W best one-token extensions, best first, their parents and their last tokens."""
    batch, width, vocab = logits.shape
    logits = logits.astype(jnp.float32)
    norms = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # After the norms, so that an end forced by the limit costs what the model says.
    forbidden = must_end[:, None, None] & (jnp.arange(vocab) != end)[None, None, :]
    logits = jnp.where(forbidden, -jnp.inf, logits)
    # Each hypothesis' own best first: two small searches are faster than one over W x V.
    best, tokens = jax.lax.top_k(logits, min(width, vocab))
    added, tokens = (best - norms).reshape(batch, -1), tokens.reshape(batch, -1)
    totals = jnp.repeat(beams.live.scores, best.shape[-1], axis=1) + added
    _, chosen = jax.lax.top_k(totals, width)
    parents = chosen // best.shape[-1]
    added, tokens = (jnp.take_along_axis(leaf, chosen, axis=1) for leaf in (added, tokens))
    return append(take(beams.live, parents), tokens, added, beams.index), parents, tokens


def _retire(
    beams: _Beams, ended: jax.Array, limits: jax.Array, penalty: Penalty, stop: Stop
) -> _Beams:
    """`beams` one token on: those of `live` that `ended` leave it, to be kept if good enough."""
    live, count = beams.live, (beams.index + 1).astype(jnp.float32)
    # A stopped sentence finishes nothing more, however long the others take.
    ending = ended & ~beams.stopped[:, None]
    newly = live._replace(scores=jnp.where(ending, penalty(live.scores, count), -jnp.inf))
    finished = _best(beams.finished, newly)
    live = live._replace(scores=jnp.where(ended, -jnp.inf, live.scores))
    best = live.scores.max(axis=-1)
    # A score is largest at one end of the remaining lengths, whatever the penalty's sign.
    bound = jnp.maximum(penalty(best, count + 1), penalty(best, limits.astype(jnp.float32)))
    stopped = beams.stopped | stop(finished.scores, bound)
    return beams._replace(index=beams.index + 1, stopped=stopped, live=live, finished=finished)


def _best(some: Hypotheses, others: Hypotheses) -> Hypotheses:
    """The better half of `some` and `others`, best first; of equals the earlier."""
    both = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), some, others)
    _, chosen = jax.lax.top_k(both.scores, some.scores.shape[1])
    return take(both, chosen)
