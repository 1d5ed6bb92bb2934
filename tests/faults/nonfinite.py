"""NaN and infinities in the loss, one leaf of the gradient, or the input of a training."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import init_train_state, make_train_step
from tests.faults import children, states
from tests.faults.children import Count

STEPS, ROWS, SIZE = 24, 8, 5
OPTIMIZER = OptimizerConfig("constant", learning_rate=0.02, warmup_steps=0, grad_clip_norm=1.0)


class Batch(NamedTuple):
    """Rows of a linear regression; `loss` and `gradient` are added to what they are named after."""

    inputs: np.ndarray
    labels: np.ndarray
    loss: np.ndarray
    gradient: np.ndarray


@jax.custom_vjp
def _with_gradient_plus(leaf: jax.Array, amount: jax.Array) -> jax.Array:
    return leaf


def _backwards(amount: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad + amount, jnp.zeros_like(amount)


_with_gradient_plus.defvjp(lambda leaf, amount: (leaf, amount), _backwards)


def loss(params: dict, batch: Batch, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of squared errors, and the number of rows."""
    bias = _with_gradient_plus(params["bias"], batch.gradient.sum())
    errors = batch.inputs @ params["kernel"] + bias - batch.labels
    return jnp.sum(errors**2) + batch.loss.sum(), jnp.float32(len(batch.labels))


def make_batch(step: int, place: str | None = None, value: float = 0.0) -> Batch:
    """The rows of `step`, with `value` in the `place` of the last row."""
    draw = np.random.default_rng(step).standard_normal
    inputs = draw((ROWS, SIZE), np.float32)
    labels = inputs @ np.arange(1, SIZE + 1, dtype=np.float32) + 1
    batch = Batch(inputs, labels, np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32))
    if place is not None:
        getattr(batch, place)[-1] = value
    return batch


def grid(folder: Path, *forms: str) -> Count:
    """3 values x 3 places x 4 steps x 3 lengths, each a training, for each form of the step.

    The forms: the whole batch at once, in four accumulated parts, or spread over four devices. A
    step that is hit must leave parameters, optimizer and average as they are, to the byte, and be
    counted; all other steps must learn, and the training must end as one of that many steps less.
    """
    counts = [children.counted_in_child(_grid, form) for form in forms]
    return Count(*(sum(numbers) for numbers in zip(*counts, strict=True)))


def _grid(form: str) -> Iterator[tuple[str, str]]:
    flag = "--xla_force_host_platform_device_count=4"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"  # of this child alone
    start, step = _training(form)
    clean = _train(start, step, frozenset(), "loss", 0.0)["losses"]
    values, places = (math.nan, math.inf, -math.inf), ("loss", "gradient", "inputs")
    for value, place, at, length in itertools.product(
        values, places, (0, 1, 5, STEPS - 1), (1, 3, 9)
    ):
        first = min(at, STEPS - length)  # a row that ends with the last step
        hit = frozenset(range(first, first + length))
        done = _train(start, step, hit, place, value)
        yield f"{form}: {value} in {place}", _judge(done, hit, clean)


def _training(form: str) -> tuple[Any, Callable]:
    """The first state, and a compiled step of that form."""
    optimizer = make_optimizer(OPTIMIZER)
    params = {"kernel": jnp.zeros(SIZE), "bias": jnp.zeros(1)}
    state = init_train_state(params, optimizer, jax.random.key(7), ema=True)
    parts = 4 if form == "accumulated" else 1
    if form != "devices":
        step = make_train_step(loss, optimizer, grad_accumulation=parts, ema_decay=0.9)
        return state, jax.jit(step)
    add = partial(jax.lax.psum, axis_name="data")
    step = make_train_step(loss, optimizer, ema_decay=0.9, reduce=add)
    spread = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
    shards = partial(jax.tree.map, lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]))
    return state, lambda state, batch: spread(state, shards(batch))


def _train(state: Any, step: Callable, hit: frozenset, place: str, value: float) -> dict:
    """The losses of the steps not hit, and which steps changed what they should not."""
    losses, wrong, in_a_row = [], [], 0
    for number in range(STEPS):
        before = _learned(state)
        batch = make_batch(number, *((place, value) if number in hit else ()))
        state, metrics = step(state, batch)
        in_a_row = in_a_row + 1 if number in hit else 0
        unchanged = _learned(state) == before
        counted = int(metrics["consecutive_skips"]) == in_a_row and int(state.step) == number + 1
        if unchanged != (number in hit) or not counted:
            wrong.append(number)
        if number not in hit:
            losses.append(float(metrics["loss"]) / ROWS)
    return {"losses": losses, "wrong": wrong, "skipped": int(state.skipped)}


def _learned(state: Any) -> list[bytes]:
    return states.as_bytes((state.params, state.opt_state, state.ema))


def _judge(done: dict, hit: frozenset, clean: list[float]) -> str:
    if done["wrong"]:
        return f"silent: {sorted(hit)} were hit, and steps {done['wrong']} did something else"
    if done["skipped"] != len(hit):
        return f"{len(hit)} steps were hit, but {done['skipped']} counted"
    if not all(math.isfinite(loss) for loss in done["losses"]):
        return f"silent: {sorted(hit)} were hit, and a later loss is not finite"
    if len(hit) == 1 and done["losses"][-1] > 1.1 * clean[-2]:
        return f"one lost step cost more than one: {done['losses'][-1]} after {clean[-2:]}"
    return "survived"
