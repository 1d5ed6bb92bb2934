"""Beam search (Vaswani et al. 2017, section 6.1; Wu et al. 2016, section 7)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxformer.decoding.hypotheses import (
    AnyArray,
    Hypotheses,
    Step,
    append_tokens,
    check_batch,
    check_logits,
    compile_once,
    empty_hypotheses,
    gather_beams,
    is_among,
)
from jaxformer.decoding.logits_processors import (
    LogitsProcessor,
    apply_all,
    make_processors,
    renormalize,
)
from jaxformer.decoding.queue import run_to_end
from jaxformer.decoding.settings import SearchConfig
from jaxformer.ops.top_k import top_k

LengthPenalty = Callable[[Float[Array, "..."], Float[Array, "..."]], Float[Array, "..."]]
"""length_penalty_fn(log_prob, length) -> score; `length` counts EOS."""


def gnmt_length_penalty(exponent: float) -> LengthPenalty:
    """score = log p / ((5 + length) / 6)^exponent (Wu et al. 2016, equation 14)."""
    return lambda log_prob, length: log_prob / ((5.0 + length) / 6.0) ** exponent


def power_length_penalty(exponent: float) -> LengthPenalty:
    """score = log p / length^exponent: with 0 the log-probability, with 1 its mean."""
    return lambda log_prob, length: log_prob / length**exponent


_LENGTH_PENALTIES = {"gnmt": gnmt_length_penalty, "power": power_length_penalty}


def beam_search(
    step: Step,
    cache: Any,
    bos: Int[AnyArray, " B"],
    max_new_tokens: Int[AnyArray, " B"],
    config: SearchConfig = SearchConfig(),
    *,
    logits_processors: Sequence[LogitsProcessor] = (),
    length_penalty_fn: LengthPenalty | None = None,
) -> Hypotheses:
    """The `config.beam_size` best continuations that the search finds for each sentence.

    `bos`: the token before each continuation. `max_new_tokens`: the most tokens of each, at most
    `config.max_new_tokens`; below 1 there is none. The size L of the result is
    `config.max_new_tokens`, or else the largest of `max_new_tokens`. `cache` must have a method
    `reorder_beams(parents [B, W])` that returns a cache, or be a `Queue` of the B sentences. A
    sentence's result depends neither on the other sentences nor on L.

    `logits_processors` change the log-probabilities, and so the scores, after those of `config`.
    `length_penalty_fn` replaces the length penalty of `config`. An eager call compiles the search
    once if `step` is from `make_step_fn`, and at every call otherwise: call it inside `jax.jit`.

    Raises `ValueError` for shapes that do not fit.

    >>> from typing import NamedTuple
    >>> class NoCache(NamedTuple):
    ...     def reorder_beams(self, parents):
    ...         return self
    >>> def step(tokens, cache):  # EOS (2) follows with probability 0.4, token 3 with 0.6
    ...     logits = jnp.log(jnp.array([0.0, 0.0, 0.4, 0.6]))
    ...     return jnp.broadcast_to(logits, (*tokens.shape, 4)), cache
    >>> config = jf.SearchConfig(beam_size=2, length_penalty=0.0)
    >>> best = jf.beam_search(step, NoCache(), jnp.array([1]), jnp.array([2]), config)
    >>> best.tokens[0]  # two texts of at most 2 tokens
    Array([[2, 0],
           [3, 2]], dtype=int32)
    >>> [round(p, 4) for p in jnp.exp(best.scores[0]).tolist()]  # 0.4, and 0.6 x 0.4
    [0.4, 0.24]
    """
    if bos.ndim != 1 or max_new_tokens.shape != bos.shape:
        raise ValueError(
            f"bos has shape {bos.shape} and max_new_tokens has shape {max_new_tokens.shape}, but "
            "both must be [B]: give one token and one length per sentence"
        )
    check_batch(bos)
    if config.max_new_tokens is None:
        if isinstance(max_new_tokens, Tracer):
            raise ValueError(
                "max_new_tokens is traced, so the size of the result is unknown: give "
                "SearchConfig(max_new_tokens=...)"
            )
        longest = max(1, config.min_new_tokens, int(np.max(max_new_tokens, initial=0)))
        config = replace(config, max_new_tokens=longest)
    return _search(
        step,
        cache,
        bos,
        max_new_tokens,
        config=config,
        logits_processors=tuple(logits_processors),
        length_penalty_fn=length_penalty_fn,
    )


class _Beams(NamedTuple):
    bos: Int[Array, "B W"]
    limits: Int[Array, " B"]
    length: Int[Array, " B"]  # how many tokens are written
    stopped: Bool[Array, " B"]
    last: Int[Array, "B W"]
    live: Hypotheses  # unordered; scores are log-probabilities
    finished: Hypotheses
    cache: Any


@compile_once
def _search(
    step: Step,
    cache: Any,
    bos: Int[AnyArray, " B"],
    max_new_tokens: Int[AnyArray, " B"],
    *,
    config: SearchConfig,
    logits_processors: tuple[LogitsProcessor, ...],
    length_penalty_fn: LengthPenalty | None,
) -> Hypotheses:
    size, width = config.max_new_tokens, config.beam_size
    assert size is not None  # `beam_search` gives it

    def begin(texts, cache):
        first, limits = texts
        none = empty_hypotheses(len(first), width, size)
        live = none._replace(scores=none.scores.at[:, 0].set(0.0))
        bos = jnp.broadcast_to(first[:, None], (len(first), width))
        return _Beams(bos, limits, jnp.zeros_like(limits), limits < 1, bos, live, none, cache)

    if length_penalty_fn is None:
        length_penalty_fn = _LENGTH_PENALTIES[config.length_penalty_kind](config.length_penalty)
    search = _Search(step, config, logits_processors, length_penalty_fn)
    limits = jnp.minimum(jnp.asarray(max_new_tokens, jnp.int32), size)
    texts = jnp.asarray(bos, jnp.int32), limits
    return run_to_end(begin, search.advance, texts, cache, attrgetter("finished"))


class _Search(NamedTuple):
    """The values that stay the same from step to step."""

    step: Step
    config: SearchConfig
    logits_processors: tuple[LogitsProcessor, ...]
    length_penalty_fn: LengthPenalty

    def advance(self, beams: _Beams) -> _Beams:
        """`beams` with one more token."""
        logits, cache = self.step(beams.last, beams.cache)
        check_logits(logits, beams.last, self.config.eos)
        at_end = beams.length + 1 >= beams.limits
        logits, norms = self.process(logits.astype(jnp.float32), beams)
        logits = self.apply_max_length(logits, norms, at_end)
        width = self.config.beam_size
        candidates = width * (1 + self.config.extra_candidates) if width > 1 else 1
        extended, parents, tokens = _extend(beams, logits, norms, candidates)
        ended = is_among(tokens, self.config.eos) | at_end[:, None]
        beams = _finish(beams, extended, ended, self.length_penalty_fn)
        live = extended._replace(scores=jnp.where(ended, -jnp.inf, extended.scores))
        live, parents, tokens = _best_live(width, live, parents, tokens)
        stopped = beams.stopped | self.can_stop(beams, live.scores.max(axis=-1))
        cache = cache.reorder_beams(parents)
        return beams._replace(stopped=stopped, last=tokens, live=live, cache=cache)

    def process(
        self, logits: Float[Array, "B W V"], beams: _Beams
    ) -> tuple[Float[Array, "B W V"], Float[Array, "B W 1"]]:
        """The processed logits, and what to subtract from them to get log-probabilities."""
        penalties, constraints = make_processors(self.config, self.config.eos)
        constraints += self.logits_processors
        constraints += [renormalize] if self.config.renormalize_logits else []
        greedy = self.config.beam_size == 1
        logits = self.apply(penalties if greedy else [], logits, beams)
        norms = jax.nn.logsumexp(_rows(logits), axis=1).reshape(*logits.shape[:2], 1)
        on_log_probs = constraints if greedy else penalties + constraints
        if not on_log_probs:
            return logits, norms
        return self.apply(on_log_probs, logits - norms, beams), jnp.zeros_like(norms)

    def apply(
        self, processors: Sequence[LogitsProcessor], logits: Float[Array, "B W V"], beams: _Beams
    ) -> Float[Array, "B W V"]:
        """`logits` after each of `processors` in turn; `bos` counts as the prompt."""
        if not processors:
            return logits
        tokens = _rows(jnp.concatenate([beams.bos[..., None], beams.live.tokens], axis=-1))
        lengths = jnp.repeat(beams.length, logits.shape[1]) + 1
        ones = jnp.ones_like(lengths)
        processed = apply_all(processors, _rows(logits), tokens, lengths, ones)
        return processed.reshape(logits.shape)

    def apply_max_length(
        self, logits: Float[Array, "B W V"], norms: Float[Array, "B W 1"], at_end: Bool[Array, " B"]
    ) -> Float[Array, "B W V"]:
        """`logits` under `config.at_max_length`, for sentences at their last token."""
        if self.config.at_max_length == "cut":
            return logits
        rows, at_end = _rows(logits), jnp.repeat(at_end, logits.shape[1])[:, None]
        if self.config.at_max_length == "force_eos_at_no_cost":
            rows = jnp.where(at_end, _rows(norms), rows)
        is_eos = is_among(jnp.arange(logits.shape[-1]), self.config.eos)
        return jnp.where(at_end & ~is_eos[None], -jnp.inf, rows).reshape(logits.shape)

    def can_stop(self, beams: _Beams, best: Float[Array, " B"]) -> Bool[Array, " B"]:
        """Whether each search stops; `best` is its best unfinished log-probability."""
        worst = beams.finished.scores.min(axis=-1)
        if self.config.early_stopping == "beam_full":
            return (worst > -jnp.inf) | (best == -jnp.inf)
        length, limits = beams.length.astype(jnp.float32), beams.limits.astype(jnp.float32)
        if self.config.early_stopping == "heuristic":
            return worst >= self.length_penalty_fn(best, length)
        # Whatever the sign of the exponent, the best score is at one end of the lengths left.
        next_score = self.length_penalty_fn(best, length + 1)
        return worst >= jnp.maximum(next_score, self.length_penalty_fn(best, limits))


def _rows(x: Shaped[Array, "B W F"]) -> Shaped[Array, "R F"]:
    """`x` as a matrix: a TPU would copy logits with three axes into another layout for top-k."""
    return x.reshape(-1, x.shape[-1])


def _extend(
    beams: _Beams, logits: Float[Array, "B W V"], norms: Float[Array, "B W 1"], count: int
) -> tuple[Hypotheses, Int[Array, "B C"], Int[Array, "B C"]]:
    """The `count` best one-token extensions, best first, their parents and their last tokens."""
    batch, _, vocab = logits.shape
    # First the best tokens of each hypothesis: two small searches are faster than one over W x V.
    best, tokens = top_k(logits, min(count, vocab))
    added, tokens = (best - norms).reshape(batch, -1), tokens.reshape(batch, -1)
    totals = jnp.repeat(beams.live.scores, best.shape[-1], axis=1) + added
    _, chosen = jax.lax.top_k(totals, min(count, totals.shape[1]))
    parents = chosen // best.shape[-1]
    added, tokens = (jnp.take_along_axis(leaf, chosen, axis=1) for leaf in (added, tokens))
    extended = append_tokens(gather_beams(beams.live, parents), tokens, added, beams.length)
    return extended, parents, tokens


def _finish(
    beams: _Beams, extended: Hypotheses, ended: Bool[Array, "B C"], length_penalty_fn: LengthPenalty
) -> _Beams:
    """`beams` one step later, with those of the W best of `extended` that `ended`."""
    beam_size = beams.last.shape[1]
    newly = jax.tree.map(lambda leaf: leaf[:, :beam_size], extended)
    # A stopped sentence finishes nothing more, however long the others take.
    ending = ended[:, :beam_size] & ~beams.stopped[:, None]
    scores = length_penalty_fn(newly.scores, (beams.length + 1).astype(jnp.float32)[:, None])
    newly = newly._replace(scores=jnp.where(ending, scores, -jnp.inf))
    return beams._replace(length=beams.length + 1, finished=_best_half(beams.finished, newly))


def _best_live(
    beam_size: int, live: Hypotheses, parents: Int[Array, "B C"], tokens: Int[Array, "B C"]
) -> tuple[Hypotheses, Int[Array, "B W"], Int[Array, "B W"]]:
    """The `beam_size` best of `live`, their parents and tokens."""
    if live.scores.shape[1] <= beam_size:
        return live, parents, tokens
    _, kept = jax.lax.top_k(live.scores, beam_size)
    parents, tokens = (jnp.take_along_axis(leaf, kept, axis=1) for leaf in (parents, tokens))
    return gather_beams(live, kept), parents, tokens


def _best_half(older: Hypotheses, newer: Hypotheses) -> Hypotheses:
    """The best half of `older` and `newer`, best first; of equal scores the earlier one."""
    both = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), older, newer)
    _, chosen = jax.lax.top_k(both.scores, older.scores.shape[1])
    return gather_beams(both, chosen)
