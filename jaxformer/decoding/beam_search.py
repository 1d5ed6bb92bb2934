"""Beam search (Vaswani et al. 2017, section 6.1; Wu et al. 2016, section 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxformer.decoding.hypotheses import (
    Hypotheses,
    append_tokens,
    empty_hypotheses,
    gather_beams,
)
from jaxformer.decoding.logits_processors import (
    LogitsProcessor,
    apply_all,
    forbid_eos,
    force_token_at,
    make_constraints,
    penalize,
    renormalize,
)
from jaxformer.decoding.settings import SearchConfig
from jaxformer.decoding.state import (
    DecodeState,
    Rules,
    advance_until,
    row_values,
    without_values,
)
from jaxformer.decoding.step import (
    Step,
    check_batch,
    check_beams,
    check_logits,
    check_room,
    is_among,
    largest,
)
from jaxformer.ops.cross_entropy import logsumexp
from jaxformer.ops.masks import AnyArray
from jaxformer.ops.top_k import top_k


def length_penalty(
    kind: str,
    exponent: Float[AnyArray, "..."],
    log_prob: Float[Array, "..."],
    length: Float[Array, "..."],
) -> Float[Array, "..."]:
    """The score of hypotheses of `length` tokens, EOS included.

    gnmt: log p / ((5 + length) / 6)^exponent (Wu et al. 2016, equation 14). power: log p /
    length^exponent, with exponent 0 the log-probability, with 1 its mean.
    """
    return log_prob / ((5.0 + length) / 6.0 if kind == "gnmt" else length) ** exponent


def beam_search(
    step: Step,
    cache: Any,
    bos: Int[AnyArray, " B"],
    max_new_tokens: Int[AnyArray, " B"],
    config: SearchConfig = SearchConfig(),
    *,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> Hypotheses:
    """The `config.beam_size` best continuations that the search finds for each sentence.

    `bos`: the token before each continuation. `max_new_tokens`: the most tokens of each, at most
    `config.max_new_tokens`; below 1 there is none. The size L of the result is
    `config.max_new_tokens`, or else the largest of `max_new_tokens`. `cache` must have a method
    `reorder_beams(parents [B, W])` that returns a cache. A sentence's result depends neither on the
    other sentences nor on L.

    `logits_processors` change the log-probabilities, and so the scores, after the settings of
    `config` have. Scores are NaN where the logits are. An eager call compiles its loop: call it
    inside `jax.jit`.

    Raises `ValueError` for shapes that do not fit, and for a cache with room for fewer tokens or
    for another number of beams.

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
    size = most = _size(bos, max_new_tokens, config)
    config = replace(config, max_new_tokens=size)
    if not isinstance(max_new_tokens, Tracer):
        most = min(most, largest(max_new_tokens))
    check_room(cache, most)
    processors = tuple(logits_processors)
    state = begin_beams(cache, bos, max_new_tokens, config, logits_processors=processors)
    return beam_more(step, state, size).finished


class BeamState(DecodeState):
    """B sentences in the middle of their search: `begin_beams` makes it, `beam_more` goes on.

    `live` are the unfinished hypotheses, unordered, with log-probabilities as scores; `finished` is
    the result.
    """

    bos: Int[Array, "B W"]
    live: Hypotheses
    finished: Hypotheses


def begin_beams(
    cache: Any,
    bos: Int[AnyArray, " B"],
    max_new_tokens: Int[AnyArray, " B"],
    config: SearchConfig,
    *,
    values: Mapping[str, Shaped[AnyArray, " B"]] | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> BeamState:
    """The state of `beam_search` before its first token, from the same arguments.

    `values` are the settings in which sentences may differ within one program: an array [B] for
    each field that `config.VALUES` names. None: all sentences have the values of `config`.
    """
    batch = len(bos)
    size = _size(bos, max_new_tokens, config)
    width = config.beam_size
    check_beams(cache, width)
    none = empty_hypotheses(batch, width, size)
    first = jnp.broadcast_to(jnp.asarray(bos, jnp.int32)[:, None], (batch, width))
    limits = jnp.minimum(jnp.asarray(max_new_tokens, jnp.int32), size)
    shared = replace(without_values(config), max_new_tokens=None)
    return BeamState(
        cache=cache,
        values=row_values(config, batch) if values is None else dict(values),
        limits=limits,
        lengths=jnp.zeros_like(limits),
        stopped=limits < 1,
        bos=first,
        last=first,
        live=none._replace(scores=none.scores.at[:, 0].set(0.0)),
        finished=none,
        rules=Rules(shared, config.eos, tuple(logits_processors)),
    )


def beam_more(
    step: Step, state: BeamState, n: Int[Array, ""] | int, ended: Int[Array, ""] | int | None = None
) -> BeamState:
    """`state` after up to `n` more tokens of each sentence.

    It returns as soon as the searches of `ended` of the B sentences have stopped; None: when all
    have.
    """
    return advance_until(lambda state: _advance(step, state), state, n, ended)


def _size(
    bos: Int[AnyArray, " B"], max_new_tokens: Int[AnyArray, " B"], config: SearchConfig
) -> int:
    """L; `ValueError` for shapes that do not fit."""
    if bos.ndim != 1 or max_new_tokens.shape != bos.shape:
        raise ValueError(
            f"bos has shape {bos.shape} and max_new_tokens has shape {max_new_tokens.shape}, but "
            "both must be [B]: give one token and one length per sentence"
        )
    check_batch(bos)
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if isinstance(max_new_tokens, Tracer):
        raise ValueError(
            "max_new_tokens is traced, so the size of the result is unknown: give "
            "SearchConfig(max_new_tokens=...)"
        )
    return max(1, config.min_new_tokens, largest(max_new_tokens))


def _advance(step: Step, beams: BeamState) -> BeamState:
    """`beams` with one more token."""
    config = beams.rules.config
    _, width = beams.last.shape
    logits, cache = step(beams.last, beams.cache)
    check_logits(logits, beams.last, config.eos)
    at_end = beams.lengths + 1 >= beams.limits
    candidates = width * (1 + config.extra_candidates) if width > 1 else 1
    best = _best_tokens(_rows(logits.astype(jnp.float32)), beams, at_end, candidates)
    extended, parents, tokens = _extend(beams, *best, candidates)
    ended = is_among(tokens, config.eos) | at_end[:, None]
    beams = _finish(beams, extended, ended)
    live = extended._replace(scores=jnp.where(ended, -jnp.inf, extended.scores))
    live, parents, tokens = _best_live(width, live, parents, tokens)
    # Of logits that are NaN no score is good enough, but each search ends at its limit.
    stopped = beams.stopped | at_end | _can_stop(beams, live.scores.max(axis=-1))
    cache = cache.reorder_beams(parents)
    return beams.replace(stopped=stopped, last=tokens, live=live, cache=cache)


def _best_tokens(
    logits: Float[Array, "R V"], beams: BeamState, at_end: Bool[Array, " B"], count: int
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """The k best next tokens of each hypothesis, after their log-probabilities; k <= `count`."""
    config = beams.rules.config
    _, width = beams.last.shape
    processors = [*beams.rules.logits_processors]
    if config.forced_bos is not None:
        processors.insert(0, force_token_at(config.forced_bos))
    if config.renormalize_logits:
        processors.append(renormalize)
    # What becomes of a stopped sentence does not matter; a row without one has no penalty.
    goes_on = ~beams.stopped
    penalties, early, lengths, at_end = (
        jnp.repeat(x, width)
        for x in (
            jnp.where(goes_on, beams.values["repetition_penalty"], 1),
            goes_on & (beams.lengths < beams.values["min_new_tokens"]),
            beams.lengths + 1,
            goes_on & at_end,
        )
    )
    # `bos` counts as the prompt.
    tokens = _rows(jnp.concatenate([beams.bos[..., None], beams.live.tokens], axis=-1))
    written = tokens, lengths, jnp.ones_like(lengths)
    normalizers = logsumexp(logits)[:, None]

    def constrained(rows: Float[Array, "R V"]) -> Float[Array, "R V"]:
        return apply_all(make_constraints(config), rows, *written)

    def best(rows: Float[Array, "R V"], norms: Float[Array, "R 1"]) -> tuple[Array, Array]:
        values, tokens = top_k(rows, min(count, rows.shape[1]))
        # A positive NaN is the largest number of a search, a negative one the smallest.
        return jnp.where(jnp.isfinite(norms), values - norms, jnp.nan), tokens

    def plain() -> tuple[Array, Array]:
        return constrained(logits), normalizers

    def changed() -> tuple[Array, Array]:
        if width == 1:
            rows = penalize(logits, penalties, tokens, lengths)
            norms = logsumexp(rows)[:, None]
        else:  # of log-probabilities, as in transformers
            shift = jnp.where((penalties != 1).any(), normalizers, 0 * normalizers)
            rows = penalize(logits - shift, penalties, tokens, lengths)
            norms = normalizers - shift
        rows = forbid_eos(constrained(rows), early, config.eos)
        if processors:
            rows, norms = apply_all(processors, rows - norms, *written), jnp.zeros_like(norms)
        return _apply_max_length(rows, norms, at_end, config), norms

    if processors:
        return best(*changed())
    ends = at_end if config.at_max_length != "cut" else False
    is_plain = ((penalties == 1) & ~(early | ends)).all()

    def one_search() -> tuple[Array, Array]:  # a CPU compiles it faster
        return best(*jax.lax.cond(is_plain, plain, changed))

    def two_searches() -> tuple[Array, Array]:  # of which the plain one copies no logits
        return jax.lax.cond(is_plain, lambda: best(*plain()), lambda: best(*changed()))

    return jax.lax.platform_dependent(cpu=one_search, default=two_searches)


def _apply_max_length(
    rows: Float[Array, "R V"],
    norms: Float[Array, "R 1"],
    at_end: Bool[Array, " R"],
    config: SearchConfig,
) -> Float[Array, "R V"]:
    """`rows` under `config.at_max_length`, for sentences at their last token."""
    if config.at_max_length == "cut":
        return rows
    if config.at_max_length == "force_eos_at_no_cost":
        rows = jnp.where(at_end[:, None], norms, rows)
    is_eos = is_among(jnp.arange(rows.shape[-1]), config.eos)
    return jnp.where(at_end[:, None] & ~is_eos[None], -jnp.inf, rows)


def _can_stop(beams: BeamState, best: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Whether each search stops; `best` is its best unfinished log-probability."""
    config = beams.rules.config
    worst = beams.finished.scores.min(axis=-1)
    if config.early_stopping == "beam_full":
        return (worst > -jnp.inf) | (best == -jnp.inf)
    lengths, limits = beams.lengths.astype(jnp.float32), beams.limits.astype(jnp.float32)
    score = partial(length_penalty, config.length_penalty_kind, beams.values["length_penalty"])
    if config.early_stopping == "heuristic":
        return worst >= score(best, lengths)
    # Whatever the sign of the exponent, the best score is at one end of the lengths left.
    return worst >= jnp.maximum(score(best, lengths + 1), score(best, limits))


def _rows(x: Shaped[Array, "B W F"]) -> Shaped[Array, "R F"]:
    """`x` as a matrix: a TPU would copy logits with three axes into another layout for top-k."""
    return x.reshape(-1, x.shape[-1])


def _extend(
    beams: BeamState, added: Float[Array, "R k"], tokens: Int[Array, "R k"], count: int
) -> tuple[Hypotheses, Int[Array, "B C"], Int[Array, "B C"]]:
    """The `count` best one-token extensions, best first, their parents and their last tokens.

    They are among the k best tokens of each hypothesis: two small searches are faster than one.
    """
    batch, best = len(beams.last), tokens.shape[1]
    added, tokens = added.reshape(batch, -1), tokens.reshape(batch, -1)
    totals = jnp.repeat(beams.live.scores, best, axis=1) + added
    _, chosen = jax.lax.top_k(totals, min(count, totals.shape[1]))
    parents = chosen // best
    added, tokens = (jnp.take_along_axis(leaf, chosen, axis=1) for leaf in (added, tokens))
    extended = append_tokens(gather_beams(beams.live, parents), tokens, added, beams.lengths)
    return extended, parents, tokens


def _finish(beams: BeamState, extended: Hypotheses, ended: Bool[Array, "B C"]) -> BeamState:
    """`beams` one step later; hypotheses that `ended` enter if they are among the W best."""
    beam_size = beams.last.shape[1]
    newly = jax.tree.map(lambda leaf: leaf[:, :beam_size], extended)
    # A stopped sentence finishes nothing more, however long the others take.
    ending = ended[:, :beam_size] & ~beams.stopped[:, None]
    lengths = (beams.lengths + 1).astype(jnp.float32)[:, None]
    kind = beams.rules.config.length_penalty_kind
    exponent = beams.values["length_penalty"][:, None]
    scores = length_penalty(kind, exponent, newly.scores, lengths)
    newly = newly._replace(scores=jnp.where(ending, scores, -jnp.inf))
    return beams.replace(lengths=beams.lengths + 1, finished=_best_half(beams.finished, newly))


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
    joined = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=1), older, newer)
    _, chosen = jax.lax.top_k(joined.scores, older.scores.shape[1])
    return gather_beams(joined, chosen)
