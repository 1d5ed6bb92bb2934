"""Shared by beam search and sampling: the step function and the growing hypotheses."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

AnyArray = Array | np.ndarray
Step = Callable[[Int[Array, "B W"], Any], tuple[Float[Array, "B W V"], Any]]
"""step(tokens [B, W], cache) -> (logits [B, W, V], cache), with W hypotheses per sentence."""


class Hypotheses(NamedTuple):
    """W continuations of each of B sentences, best first."""

    tokens: Int[Array, "B W L"]
    """Token ids up to and including EOS, then zeros."""
    scores: Float[Array, "B W"]
    """The sum of `log_probs` under the length penalty; -inf where there is no hypothesis."""
    log_probs: Float[Array, "B W L"]
    """The log-probability (nats) of each token, then zeros."""


def empty_hypotheses(batch: int, beam_size: int, size: int) -> Hypotheses:
    """Hypotheses without a token, with space for `size` tokens, whose scores are -inf."""
    return Hypotheses(
        jnp.zeros((batch, beam_size, size), jnp.int32),
        jnp.full((batch, beam_size), -jnp.inf, jnp.float32),
        jnp.zeros((batch, beam_size, size), jnp.float32),
    )


def append_tokens(
    hypotheses: Hypotheses,
    tokens: Int[Array, "B W"],
    log_probs: Float[Array, "B W"],
    index: Int[Array, " B"],
) -> Hypotheses:
    """`hypotheses` with `tokens` at `index`; their log-probabilities are added to the scores."""
    here = jnp.arange(hypotheses.tokens.shape[-1])[None, None] == index[:, None, None]
    return Hypotheses(
        jnp.where(here, tokens[..., None], hypotheses.tokens),
        hypotheses.scores + log_probs,
        jnp.where(here, log_probs[..., None], hypotheses.log_probs),
    )


def gather_beams(hypotheses: Hypotheses, chosen: Int[Array, "B C"]) -> Hypotheses:
    """Hypothesis `chosen[b, c]` of each sentence b."""
    return Hypotheses(
        jnp.take_along_axis(hypotheses.tokens, chosen[..., None], axis=1),
        jnp.take_along_axis(hypotheses.scores, chosen, axis=1),
        jnp.take_along_axis(hypotheses.log_probs, chosen[..., None], axis=1),
    )


def is_among(tokens: Int[Array, "*shape"], ids: Sequence[int]) -> Bool[Array, "*shape"]:
    """True at those of `tokens` that are one of `ids`."""
    return jnp.isin(tokens, np.asarray(ids, np.int32))


def check_batch(first: Int[AnyArray, " B"]) -> None:
    """Raises `ValueError` for a batch of no sentences."""
    if not len(first):
        raise ValueError("the batch is empty: give at least one sentence")


def check_logits(
    logits: Float[Array, "B W V"], tokens: Int[Array, "B W"], eos: Sequence[int]
) -> None:
    """Raises `ValueError` for logits of a wrong shape and for `eos` outside the vocabulary."""
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"the step function returned logits of shape {logits.shape} for tokens of shape "
            f"{tokens.shape}: it must return [B, W, V] for [B, W]"
        )
    if not all(0 <= token < logits.shape[-1] for token in eos):
        raise ValueError(
            f"eos={tuple(eos)}, but the step function's logits are of the tokens 0 to "
            f"{logits.shape[-1] - 1}: give EOS ids among them"
        )


def compile_once(search: Callable[..., Hypotheses]) -> Callable[..., Hypotheses]:
    """`search(step, *arrays, **settings)`, which compiles eager calls only once.

    `settings` are its keyword-only arguments, static and hashable. The step function must be a
    `jax.tree_util.Partial`, as `make_step_fn` returns it: its parameters are inputs of the compiled
    program. Any other eager call compiles its loop again.
    """
    parameters = inspect.signature(search).parameters.values()
    static = [x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY]
    compiled = jax.jit(search, static_argnames=static)

    def run(step: Step, *arrays: Any, **settings: Any) -> Hypotheses:
        leaves = jax.tree.leaves((step, arrays))
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        once = isinstance(step, Partial) and not traced
        return (compiled if once else search)(step, *arrays, **settings)

    return run
