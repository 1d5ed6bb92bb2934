"""Beam search: length penalties, stopping rules, and what happens at the limit."""

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
    take,
)
from jaxformer.decoding.largest import largest
from jaxformer.decoding.rules import Rule, Written

Penalty = Callable[[jax.Array, jax.Array], jax.Array]
Stop = Callable[[jax.Array, jax.Array], jax.Array]
Outlook = Callable[[Penalty, jax.Array, jax.Array, jax.Array], jax.Array]
"""outlook(penalty, best [B], length, limits [B]): what the best unfinished may score, [B].

`best` is its log-probability, `length` how many tokens it has.
"""
Ends = int | Sequence[int]
"""The token that ends a text, or those of which each does."""
Limit = Callable[[jax.Array, jax.Array, jax.Array, Ends], jax.Array]
"""limit(logits [B, W, V], norms [B, W, 1], now [B], end) -> logits; their logsumexp is `norms`."""


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


def at_best(penalty: Penalty, best: jax.Array, length: jax.Array, limits: jax.Array) -> jax.Array:
    """Its score if it loses nothing more: the better of ending next and of ending at the limit."""
    # A score is largest at one end of the remaining lengths, whatever the penalty's sign.
    return jnp.maximum(penalty(best, length + 1), penalty(best, limits))


def as_it_stands(
    penalty: Penalty, best: jax.Array, length: jax.Array, limits: jax.Array
) -> jax.Array:
    """Its score if it were finished now."""
    return penalty(best, length)


def at_the_limit(
    penalty: Penalty, best: jax.Array, length: jax.Array, limits: jax.Array
) -> jax.Array:
    """Its score if it loses nothing more before the limit."""
    return penalty(best, limits)


def must_end(logits: jax.Array, norms: jax.Array, now: jax.Array, end: Ends) -> jax.Array:
    """At the limit a text ends, at the cost that the model says."""
    return jnp.where(_not_the_end(logits, now, end), -jnp.inf, logits)


def ends_for_nothing(logits: jax.Array, norms: jax.Array, now: jax.Array, end: Ends) -> jax.Array:
    """At the limit a text ends, as if that were certain (a `forced_eos_token_id`)."""
    ended = jnp.where(now[:, None, None], norms, logits)
    return jnp.where(_not_the_end(logits, now, end), -jnp.inf, ended)


def is_cut(logits: jax.Array, norms: jax.Array, now: jax.Array, end: Ends) -> jax.Array:
    """At the limit any token may stand, and the text counts as finished with it."""
    return logits


def _not_the_end(logits: jax.Array, now: jax.Array, end: Ends) -> jax.Array:
    return now[:, None, None] & ~are_among(jnp.arange(logits.shape[-1]), end)[None, None, :]


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
    end: Ends,
    penalty: Penalty = _PAPER_PENALTY,
    stop: Stop = no_better,
    outlook: Outlook = at_best,
    limit: Limit = must_end,
    spare: int = 0,
    rules: Sequence[Rule] = (),
    logit_rules: Sequence[Rule] = (),
) -> Hypotheses:
    """The best continuations of each sentence that a beam of `width` hypotheses finds.

    `first` [B]: the token before the continuation. `limits` [B], at most `length` (the static
    size of the result): sentence b's continuation has at most `limits[b]` tokens, the last of
    which `limit` decides; below 1 there is none. A sentence's result depends on no other sentence,
    nor on `length`.

    A step extends the hypotheses in the `width` best ways, and those that end are finished. With
    `spare`, the unfinished among as many further ways take their places. `rules` change the
    log-probabilities, and with them the scores, knowing the tokens of the continuation so far;
    `logit_rules` change the logits of which log-probabilities are made.
    `outlook` tells `stop` what is still to be had. Raises `ValueError` for sizes or logits that
    do not fit.
    """
    check_sizes(first, limits, width, length)
    if spare < 0:
        raise ValueError(f"spare={spare}, but it counts further candidates: give 0 for none")
    limits = jnp.minimum(limits, length)
    none = empty(first.shape[0], width, length)
    last = jnp.broadcast_to(first.astype(jnp.int32)[:, None], (first.shape[0], width))
    live = none._replace(scores=none.scores.at[:, 0].set(0.0))
    beams = _Beams(jnp.zeros((), jnp.int32), limits < 1, last, live, none, cache)
    ways = penalty, stop, outlook, limit, tuple(rules), tuple(logit_rules)
    search = _Search(step, limits, end, width + spare, *ways)

    def unfinished(beams):
        return (beams.index < length) & ~beams.stopped.all()

    return jax.lax.while_loop(unfinished, search.advance, beams).finished


class _Search(NamedTuple):
    """What stays the same from step to step."""

    step: Step
    limits: jax.Array
    end: Ends
    candidates: int
    penalty: Penalty
    stop: Stop
    outlook: Outlook
    limit: Limit
    rules: tuple[Rule, ...]
    logit_rules: tuple[Rule, ...]

    def advance(self, beams: _Beams) -> _Beams:
        """`beams` one token on."""
        logits, cache = self.step(beams.last, beams.cache)
        check_logits(logits, beams.last, self.end)
        now = beams.index + 1 >= self.limits
        logits, norms = self.scored(logits.astype(jnp.float32), beams)
        logits = self.limit(logits, norms, now, self.end)
        extended, parents, tokens = _extend(beams, logits, norms, self.candidates)
        ended = are_among(tokens, self.end) | now[:, None]
        beams = _finish(beams, extended, ended, self.penalty)
        live = extended._replace(scores=jnp.where(ended, -jnp.inf, extended.scores))
        live, parents, tokens = _first(beams.last.shape[1], live, parents, tokens)
        best, count = live.scores.max(axis=-1), beams.index.astype(jnp.float32)
        bound = self.outlook(self.penalty, best, count, self.limits.astype(jnp.float32))
        stopped = beams.stopped | self.stop(beams.finished.scores, bound)
        cache = cache.select(parents)
        return beams._replace(stopped=stopped, last=tokens, live=live, cache=cache)

    def scored(self, logits: jax.Array, beams: _Beams) -> tuple[jax.Array, jax.Array]:
        """The logits and what makes log-probabilities of them, [B, W, 1], after all rules."""
        if self.logit_rules:
            logits = _ruled(logits, self.logit_rules, beams)
        norms = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if not self.rules:
            return logits, norms
        return _ruled(logits - norms, self.rules, beams), jnp.zeros_like(norms)


def _ruled(logits: jax.Array, rules: Sequence[Rule], beams: _Beams) -> jax.Array:
    """`logits` [B, W, V] after one rule after another."""
    tokens = beams.live.tokens
    sentences, hypotheses, places = jnp.indices(tokens.shape, sparse=True)
    written = (places < beams.index).astype(jnp.int32)
    counts = jnp.zeros(logits.shape, jnp.int32).at[sentences, hypotheses, tokens].add(written)
    each = (0, Written(0, 0, None))
    for rule in rules:
        logits = jax.vmap(jax.vmap(rule, each), each)(logits, Written(counts, tokens, beams.index))
    return logits


def _extend(
    beams: _Beams, logits: jax.Array, norms: jax.Array, count: int
) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The `count` best one-token extensions, best first, their parents and their last tokens."""
    batch, _, vocab = logits.shape
    # Each hypothesis' own best first: two small searches are faster than one over W x V.
    best, tokens = largest(logits, min(count, vocab))
    added, tokens = (best - norms).reshape(batch, -1), tokens.reshape(batch, -1)
    totals = jnp.repeat(beams.live.scores, best.shape[-1], axis=1) + added
    _, chosen = jax.lax.top_k(totals, min(count, totals.shape[1]))
    parents = chosen // best.shape[-1]
    added, tokens = (jnp.take_along_axis(leaf, chosen, axis=1) for leaf in (added, tokens))
    return append(take(beams.live, parents), tokens, added, beams.index), parents, tokens


def _finish(beams: _Beams, extended: Hypotheses, ended: jax.Array, penalty: Penalty) -> _Beams:
    """`beams` one token on, with those of the W best of `extended` that `ended`, if good enough."""
    width = beams.last.shape[1]
    newly = jax.tree.map(lambda leaf: leaf[:, :width], extended)
    # A stopped sentence finishes nothing more, however long the others take.
    ending = ended[:, :width] & ~beams.stopped[:, None]
    count = (beams.index + 1).astype(jnp.float32)
    newly = newly._replace(scores=jnp.where(ending, penalty(newly.scores, count), -jnp.inf))
    return beams._replace(index=beams.index + 1, finished=_best(beams.finished, newly))


def _first(
    width: int, live: Hypotheses, parents: jax.Array, tokens: jax.Array
) -> tuple[Hypotheses, jax.Array, jax.Array]:
    """The `width` best of `live`, their parents and tokens; as they are if there are no more."""
    if live.scores.shape[1] <= width:
        return live, parents, tokens
    _, kept = jax.lax.top_k(live.scores, width)
    parents, tokens = (jnp.take_along_axis(leaf, kept, axis=1) for leaf in (parents, tokens))
    return take(live, kept), parents, tokens


def _best(some: Hypotheses, others: Hypotheses) -> Hypotheses:
    """The better half of `some` and `others`, best first; of equals the earlier."""
    both = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), some, others)
    _, chosen = jax.lax.top_k(both.scores, some.scores.shape[1])
    return take(both, chosen)
