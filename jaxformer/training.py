"""One training step as a pure function that knows no devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxformer.losses import Loss

Metrics = dict[str, jax.Array]


class Diverged(ArithmeticError):
    """Step after step, the loss or its gradient is no finite number."""


@struct.dataclass
class TrainState:
    """All that a step changes. `ema` is a moving average of `params`, or None.

    `skipped`: how many steps so far changed nothing because their loss or gradient was not finite;
    `skipped_in_a_row`: how many of these were the last ones.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    rng: jax.Array
    ema: Any
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def init_state(
    params: Any, optimizer: optax.GradientTransformation, rng: jax.Array, *, ema: bool = False
) -> TrainState:
    """The state before the first step; `rng` (a typed key) seeds every step's dropout."""
    average = jax.tree.map(jnp.copy, params) if ema else None
    step, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(step, params, optimizer.init(params), rng, average, skipped, in_a_row)


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
    sum, in nats), "tokens", "grad_norm", and "skipped" and "skipped_in_a_row" of the new state.

    Where the loss or the norm of the gradient is not finite, parameters, optimizer and average
    stay as they are, bit for bit, and only the counters go on; all devices decide alike, because
    they decide by reduced sums. `require_finite` ends a training that only skips.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        sums = _gradient_sums(loss, state.params, batch, rng, accumulation)
        grads, total, tokens = reduce(sums)
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = optax.incremental_update(params, ema, 1.0 - ema_decay)
        # As `optax.tree.norm`, which squares imaginary parts too: twice as much to trace.
        norm = jnp.sqrt(optax.tree.sum(jax.tree.map(jnp.square, grads)))
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        kept = _choose(finite, (params, opt_state, ema), (state.params, state.opt_state, state.ema))
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        metrics = {"loss": total, "tokens": tokens, "grad_norm": norm}
        metrics |= {"skipped": skipped, "skipped_in_a_row": in_a_row}
        return TrainState(state.step + 1, *kept[:2], state.rng, kept[2], skipped, in_a_row), metrics

    return step


def require_finite(step: int, metrics: Mapping[str, Any], *, patience: int = 10) -> None:
    """Raises `Diverged` if the last `patience` steps up to `step` were all skipped.

    `metrics` are those of `step`; reading them waits for it. A run can go on from any checkpoint:
    skipped steps leave no trace in the parameters.
    """
    in_a_row = int(metrics["skipped_in_a_row"])
    if in_a_row >= patience:
        raise Diverged(
            f"the loss or its gradient was not finite in {in_a_row} steps in a row, the last of "
            f"them step {step} (loss {float(metrics['loss'])}, gradient norm "
            f"{float(metrics['grad_norm'])}): lower the learning rate, warm up longer or clip the "
            "gradient"
        )


def make_eval_step(loss: Loss) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """step(params, batch) -> (sum of the loss in nats, tokens), without dropout."""
    return lambda params, batch: loss(params, batch, None)


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    """The bits of one of two trees; a factor of 0 would not do, because 0 times NaN is NaN."""
    return jax.tree.map(lambda a, b: jax.lax.select(condition, a, b), yes, no)


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
    if leaf.ndim == 0:
        return jnp.broadcast_to(leaf, (parts,))
    if leaf.shape[0] % parts:
        raise ValueError(
            f"a batch of {leaf.shape[0]} rows cannot be accumulated in {parts} equal parts: "
            "choose a divisor"
        )
    # Every parts-th row: each part of a batch spread over devices is spread over them all.
    return leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
