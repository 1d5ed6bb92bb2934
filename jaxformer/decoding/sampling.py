"""Sampling: one continuation per text, each token drawn from the step's logits."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, Shaped, UInt32

from jaxformer.decoding.hypotheses import Hypotheses
from jaxformer.decoding.logits_processors import (
    LogitsProcessor,
    apply_all,
    forbid_eos,
    make_constraints,
    penalize,
)
from jaxformer.decoding.settings import SamplingConfig
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
    check_logits,
    check_room,
    is_among,
    largest,
)
from jaxformer.ops.cross_entropy import token_log_probs
from jaxformer.ops.dropout import hash_elements, key_words
from jaxformer.ops.masks import AnyArray
from jaxformer.ops.partitioning import whole_rows
from jaxformer.ops.top_k import top_k

_PARTIAL_SORT_SIZE = 64
"""The most likely tokens that are sorted; a larger top_k, or top_p alone, sorts all tokens."""


class SamplerInputs(NamedTuple):
    """B texts to continue, whose tokens before the last are in the cache."""

    last_tokens: Int[AnyArray, " B"]
    """The last token of each prompt."""
    max_new_tokens: Int[AnyArray, " B"]
    """The most tokens of each continuation; below 1 there is none."""
    example_ids: Int[AnyArray, " B"]
    """A number for each text; with the rng and a token's index it decides what is drawn."""
    history: Int[AnyArray, "B P"] | None = None
    """The tokens of each text so far, the last one too, for the logits processors; those at its
    end are padding. None: the last token alone."""
    history_lengths: Int[AnyArray, " B"] | None = None
    """The number of tokens of `history` that are no padding; None: all."""
    written: Int[AnyArray, " B"] | int = 0
    """The number of these tokens that earlier calls have added; they count in `max_new_tokens`."""


class SampleState(DecodeState):
    """B texts in the middle of being sampled: `begin_sampling` makes it, `sample_more` goes on.

    `history` [B, P + L] holds the tokens of each text, of which `lengths` are written;
    `prompt_lengths` of them are the prompt's, and the tokens from `starts` on are new. `log_probs`
    [B, L] are the log-probabilities of the new tokens.
    """

    seeds: UInt32[Array, "B 2"]
    prompt_lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    history: Int[Array, "B P+L"]
    log_probs: Float[Array, "B L"]

    def hypotheses(self) -> Hypotheses:
        """The new tokens of each text (W = 1)."""
        indices = jnp.arange(self.log_probs.shape[1])[None]
        places = jnp.minimum(self.starts[:, None] + indices, self.history.shape[1] - 1)
        tokens = jnp.take_along_axis(self.history, places, axis=1)
        tokens = jnp.where(indices < (self.lengths - self.starts)[:, None], tokens, 0)
        scores = self.log_probs.sum(axis=1, keepdims=True)
        return Hypotheses(tokens[:, None], scores, self.log_probs[:, None])


def sample(
    step: Step,
    cache: Any,
    prompts: SamplerInputs,
    rng: Key[Array, ""],
    config: SamplingConfig = SamplingConfig(),
    *,
    eos: tuple[int, ...] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
) -> Hypotheses:
    """One continuation of each prompt (W = 1) of at most `config.max_new_tokens` tokens.

    A text ends with a token of `eos` or at its maximum length. `logits_processors` follow the
    repetition penalty of `config` and precede its constraints; at temperature 1 they can make any
    distribution. A text depends on `rng`, its `example_ids` and the indices of its tokens, not
    on the batch. Scores and log-probabilities are the model's own, before any processor; they are
    NaN where the logits are.

    An eager call compiles its loop: call it inside `jax.jit`. Raises `ValueError` for shapes that
    do not fit, for several keys, and for a cache with room for fewer tokens.

    >>> def step(tokens, cache):  # the token after t is t + 1
    ...     return jax.nn.one_hot(tokens + 1, 9), cache
    >>> ids = jnp.array([0, 1])
    >>> limits = jnp.array([3, 3])
    >>> prompts = SamplerInputs(jnp.array([1, 4]), max_new_tokens=limits, example_ids=ids)
    >>> config = jf.SamplingConfig(max_new_tokens=3, temperature=0.0)
    >>> jf.sample(step, None, prompts, jax.random.key(0), config, eos=(6,)).tokens[:, 0]  # [B, L]
    Array([[2, 3, 4],
           [5, 6, 0]], dtype=int32)
    """
    most = config.max_new_tokens
    if not isinstance(prompts.max_new_tokens, Tracer):
        most = min(most, largest(prompts.max_new_tokens))
    check_room(cache, most)
    state = begin_sampling(
        cache, prompts, rng, config, eos=eos, logits_processors=logits_processors
    )
    return sample_more(step, state, config.max_new_tokens).hypotheses()


def begin_sampling(
    cache: Any,
    prompts: SamplerInputs,
    rng: Key[Array, ""],
    config: SamplingConfig = SamplingConfig(),
    *,
    values: Mapping[str, Shaped[AnyArray, " B"]] | None = None,
    eos: tuple[int, ...] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
) -> SampleState:
    """The state of `sample` before its first token, from the same arguments.

    `values` are the settings in which texts may differ within one program: an array [B] for each
    field that `config.VALUES` names. None: all texts have the values of `config`.
    """
    batch = _check_prompts(prompts)
    size = config.max_new_tokens
    values = row_values(config, batch) if values is None else dict(values)
    history = prompts.history
    if history is None:
        history = prompts.last_tokens[:, None]
    lengths = prompts.history_lengths
    if lengths is None:
        lengths = jnp.full(batch, history.shape[1])
    lengths = jnp.asarray(lengths, jnp.int32)
    written = jnp.broadcast_to(jnp.asarray(prompts.written, jnp.int32), (batch,))
    limits = jnp.minimum(jnp.asarray(prompts.max_new_tokens, jnp.int32), written + size)
    # A key of threefry has two words, whatever kind of key `rng` is.
    rng = jax.random.wrap_key_data(key_words(rng), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.asarray(prompts.example_ids))
    return SampleState(
        cache=cache,
        seeds=jax.random.key_data(keys),
        values=values,
        limits=limits,
        prompt_lengths=lengths - written,
        starts=lengths,
        lengths=lengths,
        stopped=written >= limits,
        last=jnp.asarray(prompts.last_tokens, jnp.int32),
        history=jnp.pad(jnp.asarray(history, jnp.int32), ((0, 0), (0, size))),
        log_probs=jnp.zeros((batch, size), jnp.float32),
        rules=Rules(without_values(config), tuple(eos), tuple(logits_processors)),
    )


def sample_more(
    step: Step,
    state: SampleState,
    n: Int[Array, ""] | int,
    ended: Int[Array, ""] | int | None = None,
) -> SampleState:
    """`state` after up to `n` more tokens of each text.

    It returns as soon as `ended` of the B texts have stopped; None: when all have.
    """
    return advance_until(lambda state: _advance(step, state), state, n, ended)


def _advance(step: Step, state: SampleState) -> SampleState:
    """`state` with one more token of each text that has not stopped."""
    rules = state.rules
    goes_on = ~state.stopped
    logits, cache = step(state.last[:, None], state.cache)
    check_logits(logits, state.last[:, None], rules.eos)
    logits = logits[:, 0].astype(jnp.float32)
    penalties = state.values["repetition_penalty"]

    def drawn() -> Int[Array, " B"]:
        penalized = penalize(logits, penalties, state.history, state.lengths)
        words = jax.vmap(_fold_in)(state.seeds, state.lengths - state.prompt_lengths)
        return _draw(_processed(penalized, state), words, state.values)

    def most_likely() -> Int[Array, " B"]:  # in one pass, which writes no logits
        return jnp.argmax(_processed(logits, state), axis=1).astype(jnp.int32)

    # A row without a text has no penalty.
    is_plain = (state.values["temperature"] == 0) & (penalties == 1) | state.stopped
    token = jnp.where(goes_on, jax.lax.cond(is_plain.all(), most_likely, drawn), 0)
    rows, drop = jnp.arange(len(token)), jnp.iinfo(jnp.int32).max
    place = jnp.where(goes_on, state.lengths, drop)
    new = jnp.where(goes_on, state.lengths - state.starts, drop)
    added = token_log_probs(logits, token)
    ended = goes_on & is_among(token, rules.eos) if rules.eos else jnp.zeros_like(goes_on)
    return state.replace(
        cache=cache,
        lengths=jnp.where(goes_on, state.lengths + 1, state.lengths),
        stopped=state.stopped | ended | (state.lengths + 1 - state.prompt_lengths >= state.limits),
        last=token,
        history=state.history.at[rows, place].set(token),
        log_probs=state.log_probs.at[rows, new].set(added),
    )


def _fold_in(words: UInt32[Array, "2"], index: Int[Array, ""]) -> UInt32[Array, "2"]:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, index))


def _processed(logits: Float[Array, "B V"], state: SampleState) -> Float[Array, "B V"]:
    """`logits` after the processors and constraints, which follow the repetition penalty."""
    rules = state.rules
    processors = [*rules.logits_processors, *make_constraints(rules.config)]
    logits = apply_all(processors, logits, state.history, state.lengths, state.prompt_lengths)
    index = state.lengths - state.prompt_lengths
    return forbid_eos(logits, index < state.values["min_new_tokens"], rules.eos)


def _draw(
    logits: Float[Array, "B V"],
    words: UInt32[Array, "B 2"],
    values: Mapping[str, Shaped[AnyArray, " B"]],
) -> Int[Array, " B"]:
    """A token of each text: argmax of logits and Gumbel noise, among the tokens that are kept.

    All limits of `values` hold. `top_p` refers to the probabilities, at the temperature, among the
    `top_k` most likely tokens (Holtzman et al. 2020). `min_p` comes last and refers to the
    probability of the most likely token (Nguyen et al. 2024). At least one token is kept; among
    equally likely tokens lower ids come first.

    The noise of a token depends on its id and the text's `words` alone, so that it does not matter
    which of the ways below a batch takes.
    """
    temperature, top_k_, top_p, min_p = (
        values[name][:, None] for name in ("temperature", "top_k", "top_p", "min_p")
    )
    is_greedy = temperature == 0
    limited = (top_k_ > 0) | (top_p < 1)
    size = logits.shape[1]

    def scaled() -> Float[Array, "B V"]:
        # Relative to the largest logit, so that a very low temperature makes no infinity.
        relative = logits - logits.max(axis=1, keepdims=True)
        return relative / jnp.where(is_greedy, 1, temperature)

    def likely(relative: Float[Array, "B K"]) -> Float[Array, "B K"]:
        return jnp.where(relative >= jnp.log(min_p), relative, -jnp.inf)

    def from_all() -> Int[Array, " B"]:
        tokens = jnp.arange(size)[None]
        return jnp.argmax(likely(scaled()) + _gumbel(words, tokens), axis=1).astype(jnp.int32)

    def from_best(count: int) -> Int[Array, " B"]:
        relative = scaled()
        if count == size:
            relative = whole_rows(relative)
        ranked, tokens = top_k(relative, count)
        ranks = jnp.arange(count)[None]
        ranked = jnp.where((top_k_ == 0) | (ranks < top_k_), ranked, -jnp.inf)
        shares = jax.nn.softmax(ranked, axis=1)
        kept = (top_p == 1) | (jnp.cumsum(shares, axis=1) - shares < top_p)
        ranked = jnp.where(kept, likely(ranked), -jnp.inf)
        best = jnp.argmax(ranked + _gumbel(words, tokens), axis=1, keepdims=True)
        return jnp.take_along_axis(tokens, best, axis=1)[:, 0].astype(jnp.int32)

    likeliest = jnp.argmax(logits, axis=1).astype(jnp.int32)
    few = min(_PARTIAL_SORT_SIZE, size)
    has_few = is_greedy | ((top_k_ > 0) & (top_k_ <= few))
    ways = [lambda: likeliest, from_all, lambda: from_best(few), lambda: from_best(size)]
    # The first of them that is right for all rows: a line overrules those before it. The last one
    # is always right.
    way: Any = 3
    way = jnp.where(has_few.all(), 2, way)
    way = jnp.where(~limited.any(), 1, way)
    way = jnp.where(is_greedy.all(), 0, way)
    drawn = jax.lax.switch(way, ways)
    return jnp.where(is_greedy[:, 0], likeliest, drawn)


def _gumbel(words: UInt32[Array, "B 2"], tokens: Int[Array, "_ K"]) -> Float[Array, "B K"]:
    """Noise of which the argmax of logits and noise is distributed as softmax(logits)."""
    bits = hash_elements(words[:, :1], words[:, 1:], tokens.astype(jnp.uint32))
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24  # inside (0, 1)
    return -jnp.log(-jnp.log(uniform))


def _check_prompts(prompts: SamplerInputs) -> int:
    """B; `ValueError` for shapes that do not fit."""
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
    return shape[0]
