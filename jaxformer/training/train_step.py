"""One training step as a pure function; it does not know on which devices it runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Bool, Num

from jaxformer.errors import ConfigError, Diverged
from jaxformer.training import gradient_noise
from jaxformer.training.gradient_noise import noise_metrics, squared_norm, with_part_sums
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params

Batch = Any
"""Any pytree of arrays [B, ...] and scalars that the loss understands."""

Scalar = Num[jax.Array, ""]
Metrics = dict[str, Scalar]
LossSums = tuple[Scalar, Scalar, Metrics]
"""The sum of the loss, the number of tokens, and named auxiliary sums."""

CheckedLoss = Callable[[Params, Batch, jax.Array | None], LossSums]
"""A loss that always returns auxiliary sums."""

_METRICS = ("loss", "tokens", "grad_norm", "skipped", "consecutive_skips")

NOT_SUMS = ("grad_norm", "update_ratio", *gradient_noise.METRICS, "skipped", "consecutive_skips")
"""The metrics of a step that are not sums over its tokens."""


class TrainState(struct.PyTreeNode):
    """Everything that a step changes.

    `ema` is a moving average of `params`, or several by the names of their decays (`ema_name`), or
    None. `skipped` counts the steps that changed nothing because their loss or gradient was not
    finite. `consecutive_skips` counts those since the last finite step.

    >>> state = jf.init_train_state({"mean": jnp.zeros(())}, optax.sgd(0.5), jax.random.key(0))
    >>> int(state.step), int(state.skipped), state.ema
    (0, 0, None)
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    rng: jax.Array
    ema: Params | dict[str, Params] | None
    skipped: jax.Array
    consecutive_skips: jax.Array


EmaDecay = float | tuple[float, ...]
"""The decay of a moving average of the parameters (0: none), or those of several."""


def init_train_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    *,
    ema: bool | tuple[float, ...] = False,
) -> TrainState:
    """The state before the first step; the typed key `rng` seeds the dropout of every step.

    `ema` keeps a moving average of the parameters, or one for each of several decays; give
    `make_train_step` its `ema_decay`. The average of a schedule-free optimizer takes its place.

    >>> params = {"mean": jnp.zeros((2, 3))}
    >>> state = jf.init_train_state(params, optax.adam(1e-3), jax.random.key(0), ema=True)
    >>> state.ema["mean"].shape, state.opt_state[0].mu["mean"].shape
    ((2, 3), (2, 3))
    """
    average: Any = None
    opt_state = optimizer.init(params)
    if ema is True or isinstance(opt_state, optax.contrib.ScheduleFreeState):
        average = jax.tree.map(jnp.copy, params)
    elif ema:
        average = {ema_name(decay): jax.tree.map(jnp.copy, params) for decay in ema}
    step, skipped, consecutive_skips = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(step, params, opt_state, rng, average, skipped, consecutive_skips)


def ema_name(decay: float) -> str:
    """The key in `TrainState.ema` of one of several averages, such as "0.999"."""
    return repr(float(decay))


def result_tree(
    ema_decay: float = 0.0, extra_ema_decays: Sequence[float] = (), *, schedule_free: bool = False
) -> str:
    """The part of a state that becomes the result: "params", "ema", or one of several averages.

    >>> result_tree(), result_tree(0.9), result_tree(0.9, [0.99]), result_tree(schedule_free=True)
    ('params', 'ema', 'ema/0.9', 'ema')
    """
    if schedule_free:
        return "ema"
    average = f"ema/{ema_name(ema_decay)}" if extra_ema_decays else "ema"
    return average if ema_decay else "params"


GradientSums = tuple[Params, Scalar, Scalar, Metrics]
"""The gradient of the summed loss, and `LossSums`: all of them sums over a batch."""


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    grad_accumulation: int = 1,
    ema_decay: EmaDecay = 0.0,
    log_update_ratio: bool = False,
    gradient_noise_scale: bool = False,
    reduce: Callable[[GradientSums], GradientSums] = lambda sums: sums,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics): one update by the mean gradient over all tokens.

    `loss(params, batch, rng)` returns (sum in nats, number of tokens), or a third value, a dict of
    named auxiliary sums such as {"correct": ...}. `grad_accumulation` splits the batch into parts
    that are differentiated one after the other. `reduce` adds the sums over devices that each hold
    a part of the batch; in a step mapped over an axis "data" it is `partial(jax.lax.psum,
    axis_name="data")`. Neither changes the gradient, because sums are divided once, at the end.
    `gradient_noise_scale` adds the metrics `gradient_noise.METRICS`, which compare these parts.

    Raises `TypeError` for a loss that returns anything else, and `ConfigError` as `make_update`.

    >>> def loss(params, batch, rng):
    ...     return jnp.sum((batch - params["mean"]) ** 2), jnp.float32(batch.size)
    >>> optimizer = optax.sgd(0.5)
    >>> step = jax.jit(jf.make_train_step(loss, optimizer))
    >>> state = jf.init_train_state({"mean": jnp.zeros(())}, optimizer, jax.random.key(0))
    >>> state, metrics = step(state, jnp.array([1.0, 2.0, 6.0]))
    >>> float(metrics["loss"]), float(state.params["mean"])  # half of the gradient 2 (0 - 3)
    (41.0, 3.0)
    """
    update = make_update(optimizer, ema_decay, log_update_ratio=log_update_ratio)
    loss = checked_loss(loss)
    differentiate = measured_loss_and_gradient if gradient_noise_scale else loss_and_gradient

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums_of = partial(differentiate, loss, state.params, rng=dropout_key(state))
        return update(state, reduce(accumulate(sums_of, state.params, batch, grad_accumulation)))

    return step


def make_update(
    optimizer: optax.GradientTransformation,
    ema_decay: EmaDecay = 0.0,
    *,
    log_update_ratio: bool = False,
) -> Callable[[TrainState, GradientSums], tuple[TrainState, Metrics]]:
    """update(state, sums) -> (state, metrics): one update by the sums over a whole batch.

    Metrics: "loss" and "tokens" (sums), "grad_norm", "skipped" and "consecutive_skips" (of the new
    state), and every auxiliary sum under its name; with `log_update_ratio` also "update_ratio", the
    norm of the update divided by that of the parameters before it. Add up the auxiliary sums of the
    steps of interest, then divide them by what they count, for example by the sum of
    metrics["tokens"].

    If the loss or the gradient norm is not finite, parameters, optimizer state and average keep
    their bits and only the counters change. All devices decide alike, because the sums are those of
    all devices. `raise_if_diverged` ends a training that only skips.

    Raises `ConfigError` when the state has an average and `ema_decay` is 0, or the reverse.
    """
    if not all(0.0 <= decay < 1.0 for decay in jax.tree.leaves(ema_decay)):
        raise ConfigError(f"ema_decay={ema_decay}, but it lies in 0 <= ema_decay < 1")

    def update(state: TrainState, sums: GradientSums) -> tuple[TrainState, Metrics]:
        _check_ema(state, ema_decay)
        grads, total, tokens, auxiliary = sums
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if isinstance(opt_state, optax.contrib.ScheduleFreeState):
            ema = optax.contrib.schedule_free_eval_params(opt_state, params)
        else:
            ema = _updated_ema(state.ema, params, ema_decay)
        square = squared_norm(grads)
        norm = jnp.sqrt(square)
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        old = state.params, state.opt_state, state.ema
        params, opt_state, ema = _select(finite, (params, opt_state, ema), old)
        skipped = state.skipped + ~finite
        consecutive = jnp.where(finite, 0, state.consecutive_skips + 1)
        values = total, tokens, norm, skipped, consecutive
        auxiliary = noise_metrics(auxiliary, square, count)
        metrics = auxiliary | dict(zip(_METRICS, values, strict=True))
        if log_update_ratio:
            metrics["update_ratio"] = jnp.sqrt(squared_norm(updates) / squared_norm(state.params))
        new = TrainState(state.step + 1, params, opt_state, state.rng, ema, skipped, consecutive)
        return new, metrics

    return update


def dropout_key(state: TrainState) -> jax.Array:
    """The key of the dropout of the next step."""
    return jax.random.fold_in(state.rng, state.step)


def raise_if_diverged(step: int, metrics: Mapping[str, Any], *, patience: int = 10) -> None:
    """Raises `Diverged` if the last `patience` steps up to `step` were all skipped.

    `metrics` are those of `step`; reading them waits for it. A run can go on from any checkpoint:
    skipped steps leave no trace in the parameters.

    >>> metrics = {"loss": float("nan"), "grad_norm": float("nan"), "consecutive_skips": 2}
    >>> raise_if_diverged(12, metrics)  # training goes on
    >>> raise_if_diverged(12, metrics, patience=2)
    Traceback (most recent call last):
        ...
    jaxformer.errors.Diverged: the loss or its gradient was not finite in 2 steps in a row, ...
    """
    in_a_row = int(metrics["consecutive_skips"])
    if in_a_row >= patience:
        raise Diverged(
            f"the loss or its gradient was not finite in {in_a_row} steps in a row, the last of "
            f"them step {step} (loss {float(metrics['loss'])}, gradient norm "
            f"{float(metrics['grad_norm'])}): lower the learning rate, warm up longer or clip the "
            "gradient"
        )


def make_eval_step(loss: Loss) -> Callable[[Params, Batch], Metrics]:
    """step(params, batch) -> metrics: the sums of the loss, without dropout.

    Metrics: "loss" (in nats), "tokens", and every auxiliary sum under its name, as those of
    `make_train_step`. Add them up over batches, then divide.

    >>> def loss(params, batch, rng):
    ...     return jnp.sum((batch - params["mean"]) ** 2), jnp.float32(batch.size)
    >>> metrics = make_eval_step(loss)({"mean": jnp.float32(3.0)}, jnp.array([1.0, 2.0, 6.0]))
    >>> float(metrics["loss"]), float(metrics["tokens"])  # 4 + 1 + 9
    (14.0, 3.0)
    """

    def step(params: Params, batch: Batch) -> Metrics:
        total, tokens, auxiliary = checked_loss(loss)(params, batch, None)
        return auxiliary | {"loss": total, "tokens": tokens}

    return step


def checked_loss(loss: Loss) -> CheckedLoss:
    """`loss` with auxiliary sums, {} if it has none; `TypeError` if it returns anything else."""

    def sums(params: Params, batch: Batch, rng: jax.Array | None) -> LossSums:
        found = loss(params, batch, rng)
        if not _is_sums(found):
            raise TypeError(
                f"the loss returned {_describe(found)}, but it must return (sum in nats, number of "
                "tokens) or (sum in nats, number of tokens, {name: sum}), all of them scalars: "
                "return sums, not means; the step divides by the number of tokens"
            )
        total, tokens = found[:2]
        auxiliary = found[2] if len(found) == 3 else {}
        taken = set(auxiliary) & {*_METRICS, *NOT_SUMS}
        if taken:
            raise TypeError(
                f"the loss returned an auxiliary sum named {min(taken)!r}, which is a metric of "
                "the step itself: use another name"
            )
        return total, tokens, dict(auxiliary)

    return sums


def _is_sums(found: Any) -> bool:
    """Whether `found` has the form of `Sums`."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        return False
    named = found[2] if len(found) == 3 else {}
    return isinstance(named, Mapping) and all(map(_is_scalar, (*found[:2], *named.values())))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.number, float, int)) and jnp.ndim(x) == 0


def _describe(found: Any) -> str:
    """The structure and the shapes of `found`."""
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", found))


def _updated_ema(ema: Any, params: Params, ema_decay: EmaDecay) -> Any:
    """The moving average or averages after a step to `params`; None if there are none."""
    if ema is None:
        return None
    if isinstance(ema_decay, tuple):
        return {ema_name(d): _updated_ema(ema[ema_name(d)], params, d) for d in ema_decay}
    return optax.incremental_update(params, ema, 1.0 - ema_decay)


def _check_ema(state: TrainState, ema_decay: EmaDecay) -> None:
    """Raises `ConfigError` unless the state has the averages whose decays are given."""
    if isinstance(ema_decay, tuple):
        names = sorted(map(ema_name, ema_decay))
        kept = state.ema.keys() if isinstance(state.ema, dict) else ()
        if sorted(kept) != names:
            raise ConfigError(
                f"ema_decay={ema_decay}, but the state does not have these averages: make it by "
                f"init_train_state(..., ema={ema_decay})"
            )
    elif state.ema is None and ema_decay > 0:
        raise ConfigError(
            f"ema_decay={ema_decay}, but the state has no average: make it by "
            "init_train_state(..., ema=True), or leave ema_decay out"
        )
    elif isinstance(state.opt_state, optax.contrib.ScheduleFreeState):
        if ema_decay:
            raise ConfigError(
                f"ema_decay={ema_decay}, but a schedule-free optimizer has an average of its own: "
                "leave ema_decay out"
            )
    elif state.ema is not None and ema_decay == 0:
        raise ConfigError(
            "the state has an average, but no ema_decay was given: give a decay such as "
            "ema_decay=0.999, or make the state without ema=True"
        )


def _select(condition: Bool[jax.Array, ""], yes: Any, no: Any) -> Any:
    """`yes` or `no`, bit for bit. It does not multiply by 0, because 0 times NaN is NaN."""
    return jax.tree.map(lambda a, b: jax.lax.select(condition, a, b), yes, no)


def loss_and_gradient(
    loss: CheckedLoss, params: Params, batch: Batch, rng: jax.Array | None
) -> GradientSums:
    """The gradient of the loss by `params`, and the sums of the loss."""

    def with_rest(params: Params) -> tuple[Scalar, tuple[Scalar, Metrics]]:
        total, tokens, auxiliary = loss(params, batch, rng)
        return total, (tokens, auxiliary)

    (total, (tokens, auxiliary)), grads = jax.value_and_grad(with_rest, has_aux=True)(params)
    return grads, total, tokens, auxiliary


def measured_loss_and_gradient(
    loss: CheckedLoss, params: Params, batch: Batch, rng: jax.Array | None
) -> GradientSums:
    """`loss_and_gradient`, with the auxiliary sums of which the noise scale is made."""
    return with_part_sums(loss_and_gradient(loss, params, batch, rng))


def accumulate(
    sums_of: Callable[[Batch], GradientSums], params: Params, batch: Batch, parts: int
) -> GradientSums:
    """The sum of `sums_of(part)` over `parts` parts of the batch, one after the other.

    The gradients have the shapes and types of `params`.
    """
    if parts == 1:
        return sums_of(batch)

    def add(sums: Any, part: Batch) -> Any:
        *found, auxiliary = sums_of(part)
        return jax.tree.map(jnp.add, sums, tuple(found)), auxiliary

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    start = zeros, jnp.zeros(()), jnp.zeros(())
    sums, auxiliary = jax.lax.scan(add, start, jax.tree.map(lambda x: _split(x, parts), batch))
    return *sums, jax.tree.map(lambda x: x.sum(axis=0), auxiliary)


def _split(leaf: jax.Array, parts: int) -> jax.Array:
    """A leaf [B, ...] of a batch as [parts, B / parts, ...]; a scalar as [parts]."""
    if leaf.ndim == 0:
        return jnp.broadcast_to(leaf, (parts,))
    if leaf.shape[0] % parts:
        raise ConfigError(
            f"a batch of {leaf.shape[0]} rows does not divide into grad_accumulation={parts} equal "
            "parts: choose a divisor"
        )
    # A part has every parts-th row, so it is spread over all devices if the batch is.
    return leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
