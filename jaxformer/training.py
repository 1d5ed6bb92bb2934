"""One training step as a pure function that knows no devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxformer.losses import Loss

Metrics = dict[str, jax.Array]


class Diverged(ArithmeticError):
    """The loss is no longer a finite number."""


@struct.dataclass
class TrainState:
    """All that a step changes. `ema` is a moving average of `params`, or None."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    rng: jax.Array
    ema: Any = None


def init_state(
    params: Any, optimizer: optax.GradientTransformation, rng: jax.Array, *, ema: bool = False
) -> TrainState:
    """The state before the first step; `rng` (a typed key) seeds every step's dropout."""
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), rng, average)


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    ema_decay: float = 0.0,
    reduce: Callable[[Any], Any] = lambda sums: sums,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics): one update by the mean gradient over all tokens.

    `accumulation` parts of the batch are differentiated one after the other; `reduce` adds up
    (gradient, loss, tokens) over devices where the batch is spread by hand (`jax.lax.psum`).
    Neither changes the gradient, because sums are divided once, at the end. Metrics: "loss" (a
    sum, in nats), "tokens", "grad_norm".
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        sums = _gradient_sums(loss, state.params, batch, rng, accumulation)
        grads, total, tokens = reduce(sums)
        grads = jax.tree.map(lambda g: g / jnp.maximum(tokens, 1.0), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = optax.incremental_update(params, ema, 1.0 - ema_decay)
        metrics = {"loss": total, "tokens": tokens, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state, state.rng, ema), metrics

    return step


def make_eval_step(loss: Loss) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """step(params, batch) -> (sum of the loss in nats, tokens), without dropout."""
    return lambda params, batch: loss(params, batch, None)


def _gradient_sums(
    loss: Loss, params: Any, batch: Any, rng: jax.Array, parts: int
) -> tuple[Any, jax.Array, jax.Array]:
    differentiate = jax.value_and_grad(loss, has_aux=True)

    def sums_of(part):
        (total, tokens), grads = differentiate(params, part, rng)
        return grads, total, tokens

    if parts == 1:
        return sums_of(batch)
    batch = jax.tree.map(lambda leaf: _split(leaf, parts), batch)
    zeros = jax.tree.map(jnp.zeros_like, (params, jnp.zeros(()), jnp.zeros(())))

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, sums_of(part)), None

    return jax.lax.scan(add, zeros, batch)[0]


def _split(leaf: jax.Array, parts: int) -> jax.Array:
    if leaf.shape[0] % parts:
        raise ValueError(
            f"a batch of {leaf.shape[0]} rows cannot be accumulated in {parts} equal parts: "
            "choose a divisor"
        )
    # Every parts-th row: each part of a batch spread over devices is spread over them all.
    return leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
