"""Search and sampling over a step function; nothing here knows a model.

A step is `step(tokens [B, W], cache) -> (logits [B, W, V], cache)`, W hypotheses a sentence;
the cache offers `cache.select(parents [B, W]) -> cache`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.losses import token_log_probs

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
Penalty = Callable[[jax.Array, jax.Array], jax.Array]
Stop = Callable[[jax.Array, jax.Array], jax.Array]
Pick = Callable[[jax.Array, jax.Array], jax.Array]


class Hypotheses(NamedTuple):
    """W continuations of each of B sentences, best first.

    `tokens` [B, W, L]: up to and including the end token, then zeros. `scores` [B, W]: the sum
    of `log_probs` [B, W, L] (nats) under the length penalty, -inf where there is no hypothesis.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probs: jax.Array


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
    _check_sizes(first, limits, width, length)
    limits = jnp.minimum(limits, length)
    none = _empty(first.shape[0], width, length)
    last = jnp.broadcast_to(first.astype(jnp.int32)[:, None], (first.shape[0], width))
    live = none._replace(scores=none.scores.at[:, 0].set(0.0))
    beams = _Beams(jnp.zeros((), jnp.int32), limits < 1, last, live, none, cache)

    def unfinished(beams):
        return (beams.index < length) & ~beams.stopped.all()

    def advance(beams):
        logits, cache = step(beams.last, beams.cache)
        _check_logits(logits, beams.last, end)
        extended, parents, tokens = _extend(beams, logits, beams.index + 1 >= limits, end)
        beams = _retire(beams._replace(live=extended), tokens == end, limits, penalty, stop)
        return beams._replace(last=tokens, cache=cache.select(parents))

    return jax.lax.while_loop(unfinished, advance, beams).finished


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
    end: int,
) -> Hypotheses:
    """One continuation of each sentence (W = 1), each token chosen by `pick`.

    As `beam_search`, but at a sentence's limit the text is cut rather than ended. A token's
    randomness is keyed by `rng`, its sentence's number `rows` [B] and its position, so that a
    text does not depend on its batch. Scores are sums of the unpenalised log-probabilities.
    """
    _check_sizes(first, limits, 1, length)
    if rows.shape != first.shape:
        raise ValueError(f"rows has shape {rows.shape}, but must be {first.shape}, like first")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, rows)
    texts = _empty(first.shape[0], 1, length)
    texts = texts._replace(scores=jnp.zeros_like(texts.scores))

    def unfinished(carry):
        return (carry[0] < length) & ~carry[1].all()

    def advance(carry):
        index, stopped, last, texts, cache = carry
        logits, cache = step(last[:, None], cache)
        _check_logits(logits, last[:, None])
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        token = jnp.where(stopped, 0, jax.vmap(pick)(logits[:, 0].astype(jnp.float32), now))
        added = jnp.where(stopped, 0.0, token_log_probs(logits[:, 0], token))
        texts = _append(texts, token[:, None], added[:, None], index)
        return index + 1, stopped | (token == end) | (index + 1 >= limits), token, texts, cache

    start = (jnp.zeros((), jnp.int32), limits < 1, first.astype(jnp.int32), texts, cache)
    return jax.lax.while_loop(unfinished, advance, start)[3]


def greedy(logits: jax.Array, rng: jax.Array) -> jax.Array:
    """The likeliest token."""
    return jnp.argmax(logits).astype(jnp.int32)


def temperature(value: float) -> Pick:
    """A token drawn from softmax(logits / value); `ValueError` unless value > 0."""
    _check_temperature(value)
    return lambda logits, rng: jax.random.categorical(rng, logits / value).astype(jnp.int32)


def top_k(k: int, value: float = 1.0) -> Pick:
    """A token drawn from the k likeliest, at temperature `value`; `ValueError` if k < 1."""
    _check_temperature(value)
    if k < 1:
        raise ValueError(f"top_k was given k={k}, but needs at least 1: give 1 for the likeliest")

    def pick(logits, rng):
        best, tokens = jax.lax.top_k(logits, min(k, logits.shape[-1]))
        return tokens[jax.random.categorical(rng, best / value)].astype(jnp.int32)

    return pick


def top_p(p: float, value: float = 1.0) -> Pick:
    """A token drawn from the fewest likeliest whose probability reaches p (Holtzman 2020).

    The probability is that at temperature `value`. `ValueError` unless 0 < p <= 1.
    """
    _check_temperature(value)
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p was given p={p}, but needs 0 < p <= 1: give 1 for all tokens")

    def pick(logits, rng):
        order = jnp.argsort(-logits)
        ranked = logits[order] / value
        probabilities = jax.nn.softmax(ranked)
        before = jnp.cumsum(probabilities) - probabilities
        kept = jnp.where(before < p, ranked, -jnp.inf)
        return order[jax.random.categorical(rng, kept)].astype(jnp.int32)

    return pick


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
    return _append(_take(beams.live, parents), tokens, added, beams.index), parents, tokens


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


def _empty(batch: int, width: int, length: int) -> Hypotheses:
    return Hypotheses(
        jnp.zeros((batch, width, length), jnp.int32),
        jnp.full((batch, width), -jnp.inf, jnp.float32),
        jnp.zeros((batch, width, length), jnp.float32),
    )


def _append(
    hypotheses: Hypotheses, tokens: jax.Array, added: jax.Array, index: jax.Array
) -> Hypotheses:
    """`hypotheses` with `tokens` [B, W] of log-probability `added` [B, W] at `index`."""
    return Hypotheses(
        hypotheses.tokens.at[:, :, index].set(tokens),
        hypotheses.scores + added,
        hypotheses.log_probs.at[:, :, index].set(added),
    )


def _take(hypotheses: Hypotheses, chosen: jax.Array) -> Hypotheses:
    """Hypothesis `chosen[b, w]` of each sentence b, as [B, W', ...]."""
    return Hypotheses(
        jnp.take_along_axis(hypotheses.tokens, chosen[..., None], axis=1),
        jnp.take_along_axis(hypotheses.scores, chosen, axis=1),
        jnp.take_along_axis(hypotheses.log_probs, chosen[..., None], axis=1),
    )


def _best(some: Hypotheses, others: Hypotheses) -> Hypotheses:
    """The better half of `some` and `others`, best first; of equals the earlier."""
    both = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), some, others)
    _, chosen = jax.lax.top_k(both.scores, some.scores.shape[1])
    return _take(both, chosen)


def _check_sizes(first: jax.Array, limits: jax.Array, width: int, length: int) -> None:
    if first.ndim != 1 or limits.shape != first.shape:
        raise ValueError(
            f"first has shape {first.shape} and limits {limits.shape}, but both must be [B]: give "
            "one token and one limit a sentence"
        )
    if width < 1 or length < 1:
        raise ValueError(f"width={width} and length={length}, but both must be at least 1")


def _check_logits(logits: jax.Array, tokens: jax.Array, end: int = 0) -> None:
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"the step made logits of shape {logits.shape} from tokens [B, W] of shape "
            f"{tokens.shape}: it must make [B, W, V]"
        )
    if not 0 <= end < logits.shape[-1]:
        raise ValueError(
            f"end={end} is not among the {logits.shape[-1]} tokens: no hypothesis could end"
        )


def _check_temperature(value: float) -> None:
    if not value > 0:
        raise ValueError(f"temperature {value} was given, but it must be positive: see greedy")
