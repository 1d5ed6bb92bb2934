"""One training step as a pure function; it does not know on which devices it runs.

Sums over tokens are added up over the parts of a batch and over devices, and divided once.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Num

from jaxformer.errors import ConfigError, Diverged
from jaxformer.ops.manual_axes import vary_as
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params, flatten, map_with_path

Batch = Any
"""Any pytree of arrays [B, ...] and scalars that the loss understands."""

_RATE = "hyperparams/learning_rate"
"""The end of the path of the peak learning rate in the state of `make_optimizer`'s optimizer."""

Scalar = Num[jax.Array, ""]
Metrics = dict[str, Scalar]
GradientSums = tuple[Params, Scalar, Scalar, Metrics]
"""Sums over a batch: the gradient, the loss, the number of tokens, and named auxiliary sums."""


class StepSums(NamedTuple):
    """The metrics of every step that are sums over its batch."""

    loss: Scalar
    tokens: Scalar


class StepStatistics(NamedTuple):
    """The metrics of every step that are no sums over its batch; counts are the new state's."""

    grad_norm: Scalar
    skipped: Scalar
    consecutive_skips: Scalar


class TrainState(struct.PyTreeNode):
    """Everything that a step changes.

    `ema` is a moving average of `params`, or None. `skipped` counts the steps that changed nothing
    because their loss or gradient was not finite. `consecutive_skips` counts those since the last
    finite step.

    >>> state = jf.init_train_state({"mean": jnp.zeros(())}, optax.sgd(0.5), jax.random.key(0))
    >>> int(state.step), int(state.skipped), state.ema
    (0, 0, None)
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    rng: jax.Array
    ema: Params | None
    skipped: jax.Array
    consecutive_skips: jax.Array

    @property
    def dropout_rng(self) -> jax.Array:
        """The key of the dropout of the next step."""
        return jax.random.fold_in(self.rng, self.step)


def init_train_state(
    params: Params, optimizer: optax.GradientTransformation, rng: jax.Array, *, ema: bool = False
) -> TrainState:
    """The state before the first step; the typed key `rng` seeds the dropout of every step.

    The state has copies of `params` and `rng`: a step that reuses its memory leaves these as they
    are.

    `ema` keeps a moving average of the parameters; give `make_train_step` its `ema_decay`.

    >>> params = {"mean": jnp.zeros((2, 3))}
    >>> state = jf.init_train_state(params, optax.adam(1e-3), jax.random.key(0), ema=True)
    >>> state.ema["mean"].shape, state.opt_state[0].mu["mean"].shape
    ((2, 3), (2, 3))
    """
    params, rng = jax.tree.map(jnp.copy, (params, rng))
    average = jax.tree.map(jnp.copy, params) if ema else None
    step, skipped, consecutive_skips = (jnp.zeros((), jnp.int32) for _ in range(3))
    opt_state = optimizer.init(params)
    return TrainState(step, params, opt_state, rng, average, skipped, consecutive_skips)


def with_learning_rate(state: TrainState, learning_rate: float) -> TrainState:
    """`state`, whose next updates have this peak learning rate.

    A state keeps the rate of the optimizer that made it, also when it is restored and goes on with
    another `OptimizerConfig`. Raises `ConfigError` for a negative rate, and for the state of an
    optimizer that `make_optimizer` has not made, or has made with a `schedule`: that optimizer
    itself has the rate.

    >>> optimizer = jf.make_optimizer(jf.OptimizerConfig(learning_rate=0.1, warmup_steps=0))
    >>> state = jf.init_train_state({"mean": jnp.zeros(())}, optimizer, jax.random.key(0))
    >>> slower = jf.with_learning_rate(state, 0.01)
    >>> [round(float(x.opt_state[-1].hyperparams["learning_rate"]), 4) for x in (state, slower)]
    [0.1, 0.01]
    """
    if not 0.0 <= learning_rate < math.inf:
        raise ConfigError(f"learning_rate={learning_rate}, but it must be finite and at least 0")
    if not any(path.endswith(_RATE) for path in flatten(state.opt_state)):
        raise ConfigError(
            "the state keeps no learning rate: its optimizer has one of its own, so make that "
            "optimizer with another rate or schedule"
        )

    def changed(path: str, leaf: jax.Array) -> jax.Array:
        if not path.endswith(_RATE):
            return leaf
        return jax.device_put(np.asarray(learning_rate, leaf.dtype), leaf.sharding)

    return state.replace(opt_state=map_with_path(changed, state.opt_state))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    grad_accumulation: int = 1,
    ema_decay: float = 0.0,
    reduce: Callable[[GradientSums], GradientSums] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics): one update by the mean gradient over all tokens.

    `loss(params, batch, rng)` returns (sum in nats, number of tokens), or a third value, a dict of
    named auxiliary sums such as {"correct": ...}. `grad_accumulation` splits the batch into parts
    that are differentiated one after the other. `reduce` adds the sums over devices that each hold
    a part of the batch; in a step mapped over an axis "data" it is `partial(jax.lax.psum,
    axis_name="data")`, under `jax.shard_map` with either value of `check_vma` (with False where its
    `axis_names` leave axes to XLA). Neither changes the gradient, because sums are divided once, at
    the end. All parts and devices get the same `rng`, so a loss that draws random numbers folds in
    what tells the examples apart, or gives its model `DropoutRng(rng, example_ids)`, as our losses
    do. After n updates the decay of the average is the smaller of `ema_decay` and
    (1 + n) / (10 + n): a short training forgets its first values.

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
    update = make_update(optimizer, ema_decay)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # JAX itself adds up the gradient by parameters that are the same on all devices, and
        # `reduce` would add it up a second time.
        params = vary_as(state.params, batch)
        sums_of = partial(loss_and_gradient, loss, params, rng=state.dropout_rng)
        sums = accumulate(sums_of, params, batch, grad_accumulation)
        if reduce is not None:
            return update(state, reduce(sums), value_fn=refuse_line_search)
        value_fn = mean_loss(loss, batch, state.dropout_rng, grad_accumulation)
        return update(state, sums, value_fn=value_fn)

    return step


def loss_and_gradient(
    loss: Loss, params: Params, batch: Batch, rng: jax.Array | None
) -> GradientSums:
    """The gradient of the loss by `params`, and the sums of the loss."""
    differentiate = jax.value_and_grad(loss_sums, argnums=1, has_aux=True)
    (total, (tokens, auxiliary)), grads = differentiate(loss, params, batch, rng)
    return grads, *vary_as((total, tokens, auxiliary), (params, batch))


def mean_loss(loss: Loss, batch: Batch, rng: jax.Array | None, parts: int) -> Callable[..., Scalar]:
    """value(params, specs=None, slices=1): the mean loss of the whole batch.

    It is for the line search of optax, which passes all arguments of an update to it, and refuses
    a function that does not name each of them.
    """

    def value(params: Params, specs: Any = None, slices: int = 1) -> Scalar:
        def sums_of(part: Batch) -> GradientSums:
            total, (tokens, auxiliary) = loss_sums(loss, params, part, rng)
            return {}, total, tokens, auxiliary

        _, total, tokens, _ = accumulate(sums_of, {}, batch, parts)
        return total / jnp.maximum(tokens, 1.0)

    return value


def refuse_line_search(params: Params, specs: Any = None, slices: int = 1) -> Scalar:
    """Raises `ConfigError`: a line search differentiates the loss of one device alone."""
    raise ConfigError(
        "this optimizer searches along a line, which needs the loss of all devices within its "
        "loop: give one without a search, such as optax.lbfgs(linesearch=None), or one device"
    )


def loss_sums(
    loss: Loss, params: Params, batch: Batch, rng: jax.Array | None
) -> tuple[Scalar, tuple[Scalar, Metrics]]:
    """(loss, (tokens, auxiliary)) that `loss` returns; `TypeError` for anything else."""
    returned = loss(params, batch, rng)
    if not _is_valid(returned):
        shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", returned)
        raise TypeError(
            f"the loss returned {shapes}, but it must return (sum in nats, number of tokens) or "
            "(sum in nats, number of tokens, {name: sum}), all of them scalars: return sums, not "
            "means; the step divides by the number of tokens"
        )
    total, tokens, *last = returned
    auxiliary: Mapping[str, Scalar] = last[0] if last else {}
    taken = set(auxiliary) & {*StepSums._fields, *StepStatistics._fields}
    if taken:
        raise TypeError(
            f"the loss returned an auxiliary sum named {min(taken)!r}, which is a metric of the "
            "step itself: use another name"
        )
    return total, (tokens, dict(auxiliary))


def _is_valid(returned: Any) -> bool:
    """Whether a loss returned (scalar, scalar) or (scalar, scalar, {name: scalar})."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        return False
    auxiliary = returned[2] if len(returned) == 3 else {}
    if not isinstance(auxiliary, Mapping):
        return False
    return all(map(_is_scalar, (*returned[:2], *auxiliary.values())))


def _is_scalar(value: Any) -> bool:
    is_number = isinstance(value, jax.Array | np.ndarray | np.number | float | int)
    return is_number and jnp.ndim(value) == 0


def accumulate(
    sums_of: Callable[[Batch], GradientSums], params: Params, batch: Batch, parts: int
) -> GradientSums:
    """The sum of `sums_of(part)` over `parts` parts of the batch, one after the other.

    The gradients have the shapes and types of `params`.
    """
    if parts == 1:
        return sums_of(batch)

    def add(sums: Any, part: Batch) -> Any:
        *part_sums, auxiliary = sums_of(part)
        return jax.tree.map(jnp.add, sums, tuple(part_sums)), auxiliary

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    start = vary_as((zeros, jnp.zeros(()), jnp.zeros(())), (params, batch))
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


def make_update(
    optimizer: optax.GradientTransformation, ema_decay: float = 0.0
) -> Callable[..., tuple[TrainState, Metrics]]:
    """update(state, sums, specs=None, value_fn=None, slices=1) -> (state, metrics): one update.

    `sums` are over a whole batch. `specs` are the `PartitionSpec` of each path of the parameters on
    the current mesh, and `slices` is the number of slices of TPUs that its "data" axis lies across;
    both are for optimizers that share their work among devices ("muon"). `value_fn` is as
    `mean_loss` makes it, for a line search (`optax.lbfgs`). Optimizers also get the mean loss as
    `value` and the gradient as `grad`, as `optax.contrib.reduce_on_plateau` asks for.

    Metrics: "loss" and "tokens" (sums), "grad_norm", "skipped" and "consecutive_skips" (of the new
    state), and every auxiliary sum under its name. Add up the auxiliary sums of the steps of
    interest, then divide them by what they count, for example by the sum of metrics["tokens"].

    If the loss or the gradient norm is not finite, parameters, optimizer state and average are
    unchanged and only the counters change. Every device sees the same global sums.
    `raise_if_diverged` ends a training that only skips.

    Raises `ConfigError` when the state has an average and `ema_decay` is 0, or the reverse.
    """
    if not 0.0 <= ema_decay < 1.0:
        raise ConfigError(f"ema_decay={ema_decay}, but it must be in [0, 1)")

    optimizer = optax.with_extra_args_support(optimizer)

    def update(
        state: TrainState,
        sums: GradientSums,
        specs: Mapping[str, PartitionSpec] | None = None,
        value_fn: Callable[..., Scalar] | None = None,
        slices: int = 1,
    ) -> tuple[TrainState, Metrics]:
        if (state.ema is not None) != (ema_decay > 0.0):
            raise ConfigError(
                f"ema_decay={ema_decay}, but the state has {'no' if ema_decay else 'an'} average: "
                f"make it by init_train_state(..., ema={ema_decay > 0.0}), or change ema_decay"
            )
        grads, total, tokens, auxiliary = sums
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax has no other
            updates, opt_state = optimizer.update(
                grads,
                state.opt_state,
                state.params,
                value=total / count,
                grad=grads,
                value_fn=value_fn,
                specs=specs,
                slices=slices,
            )
            params = optax.apply_updates(state.params, updates)
            ema = state.ema
            if ema is not None:  # at first the decay is small, to forget the random parameters
                done = (state.step - state.skipped).astype(jnp.float32)
                decay = jnp.minimum(ema_decay, (1.0 + done) / (10.0 + done))
                ema = optax.incremental_update(params, ema, 1.0 - decay)
        # Not `optax.tree.norm`: it also squares imaginary parts, which doubles the operations.
        norm = jnp.sqrt(jnp.asarray(optax.tree.sum(jax.tree.map(jnp.square, grads))))
        finite = jnp.isfinite(total) & jnp.isfinite(norm)
        # A product with 0 or 1 would keep NaN: 0 times NaN is NaN.
        params, opt_state, ema = jax.tree.map(
            partial(_choose, finite),
            (params, opt_state, ema),
            (state.params, state.opt_state, state.ema),
        )
        skipped = state.skipped + (~finite).astype(jnp.int32)
        consecutive = jnp.where(finite, 0, state.consecutive_skips + 1)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            rng=state.rng,
            ema=ema,
            skipped=skipped,
            consecutive_skips=consecutive,
        )
        batch_sums = StepSums(loss=total, tokens=tokens)
        statistics = StepStatistics(grad_norm=norm, skipped=skipped, consecutive_skips=consecutive)
        return new, auxiliary | batch_sums._asdict() | statistics._asdict()

    return update


def _choose(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` if `finite`, else `old`, in the type of `old`: with x64, optax computes in float64."""
    return jax.lax.select(finite, new if new.dtype == old.dtype else new.astype(old.dtype), old)


def raise_if_diverged(step: int, metrics: Mapping[str, Any], *, patience: int = 10) -> None:
    """Raises `Diverged` if the last `patience` steps up to `step` were all skipped.

    `metrics` come from `step`; reading them waits for it. A run can go on from any checkpoint:
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

    Metrics: "loss" (in nats), "tokens", and every auxiliary sum under its name, as for
    `make_train_step`. Add them up over batches, then divide.

    >>> def loss(params, batch, rng):
    ...     return jnp.sum((batch - params["mean"]) ** 2), jnp.float32(batch.size)
    >>> metrics = make_eval_step(loss)({"mean": jnp.float32(3.0)}, jnp.array([1.0, 2.0, 6.0]))
    >>> float(metrics["loss"]), float(metrics["tokens"])  # 4 + 1 + 9
    (14.0, 3.0)
    """

    def step(params: Params, batch: Batch) -> Metrics:
        total, (tokens, auxiliary) = loss_sums(loss, params, batch, None)
        return auxiliary | StepSums(loss=total, tokens=tokens)._asdict()

    return step
