"""The training step: one gradient however the batch is cut, and what a step changes."""

from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.distributed import single
from jaxformer.errors import ConfigError, Diverged
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.text.data import PairBatch
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import (
    init_train_state,
    make_eval_step,
    make_train_step,
    raise_if_diverged,
)

PAD, BOS, EOS = 0, 1, 2


def ragged_batch(rows=16, seed=0):
    """Sentences to copy, of 1 to 7 words; the second one is a padding row."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=rows)
    lengths[1] = 0
    source = np.zeros((rows, 8), np.int32)
    for row, length in enumerate(lengths):
        if length:
            source[row, : length + 1] = [*rng.integers(3, 11, size=length), EOS]
    target = np.pad(source, ((0, 0), (1, 0)))
    target[:, 0] = np.where(lengths > 0, BOS, PAD)
    return PairBatch(source, target, 100 + np.arange(rows, dtype=np.int32))


def updated(step, batch, params, optimizer, seed=3):
    """The changes of the parameters in one jitted step, and its metrics."""
    state, metrics = jax.jit(step)(init_train_state(params, optimizer, jax.random.key(seed)), batch)
    return difference(state.params, params), metrics


def difference(given, expected):
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), given, expected)


def norm(tree):
    return np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(tree)))


def relative(given, expected):
    return float(norm(difference(given, expected)) / norm(expected))


def bigram_loss(params, batch, rng):
    """A model that compiles in no time: each token from the last one, with dropout by row."""
    inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
    logits = params["table"][inputs]
    if rng is not None:
        logits = DropoutMask(DropoutRng(rng, batch.example_ids), "bigram", 0.3)(logits)
    logits = logits + params["bias"][None, None]
    return cross_entropy(logits, labels, labels != PAD, 0.1)


def bigram():
    rng = np.random.default_rng(7)
    return {
        "table": rng.normal(size=(11, 11)).astype(np.float32),
        "bias": rng.normal(size=(11,)).astype(np.float32),
    }


SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def whole():
    """The bigram's SGD update and metrics of the whole batch at once."""
    return updated(make_train_step(bigram_loss, SGD), ragged_batch(), bigram(), SGD)


def assert_same_metrics(metrics, sums):
    assert metrics["tokens"] == sums["tokens"]
    np.testing.assert_allclose(metrics["loss"], sums["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], sums["grad_norm"], rtol=1e-5)


def mapped(loss, optimizer, batch, **options):
    """State and metrics of each of 4 devices that add up their sums in one step."""
    add = partial(jax.lax.psum, axis_name="data")
    step = make_train_step(loss, optimizer, reduce=add, **options)
    shards = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), batch)
    start = init_train_state(bigram(), optimizer, jax.random.key(3))
    return jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="data"))(start, shards)


def test_all_devices_skip_what_one_cannot_use():
    state, metrics = mapped(poisoned("gradient"), ADAM, poisoned_batch(np.inf))
    assert metrics["skipped"].tolist() == [1] * 4
    for device in range(4):
        there = jax.tree.map(itemgetter(device), state.params)
        assert as_bytes(there) == as_bytes(bigram())


def test_the_sgd_update_is_the_mean_gradient_and_metrics_are_sums(whole):
    update, metrics = whole
    batch, rng = ragged_batch(), jax.random.fold_in(jax.random.key(3), 0)
    gradient = jax.jit(jax.value_and_grad(bigram_loss, has_aux=True))
    (total, tokens), grads = gradient(bigram(), batch, rng)
    mean = jax.tree.map(lambda leaf: -leaf / tokens, grads)
    assert relative(update, mean) < 1e-6
    assert metrics["tokens"] == tokens == np.sum(batch.target[:, 1:] != PAD)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm(mean), rtol=1e-5)


def test_a_step_counts_on_and_draws_new_dropout_from_the_same_rng():
    batch, still = ragged_batch(), optax.sgd(0.0)
    step = jax.jit(make_train_step(bigram_loss, still))
    start = init_train_state(bigram(), still, jax.random.key(3))
    first, metrics = step(start, batch)
    second, later = step(first, batch)
    _, again = step(start, batch)
    assert [int(state.step) for state in (start, first, second)] == [0, 1, 2]
    assert metrics["loss"] == again["loss"] != later["loss"]
    for state in (first, second):
        assert np.array_equal(jax.random.key_data(state.rng), jax.random.key_data(start.rng))
        assert state.ema is None


def bigram_with_sums(params, batch, rng):
    """The bigram's loss, and how many tokens it predicts right and how large its logits are."""
    inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
    logits, real = params["table"][inputs] + params["bias"][None, None], labels != PAD
    correct = jnp.sum((logits.argmax(-1) == labels) & real)
    size = jnp.sum(jnp.where(real, jnp.square(logits).mean(-1), 0.0))
    return *bigram_loss(params, batch, rng), {"correct": correct, "size": size}


def quadratic(params, batch, rng):
    return jnp.sum((batch - params["mean"][None]) ** 2), jnp.float32(batch.size)


@pytest.mark.parametrize("ema", [False, True])
def test_a_step_that_reuses_the_memory_of_its_state_leaves_what_the_state_was_made_of(ema):
    params, key, optimizer = {"mean": jnp.arange(5.0)}, jax.random.key(3), optax.adam(0.1)
    state = init_train_state(params, optimizer, key, ema=ema)
    step = jax.jit(make_train_step(quadratic, optimizer, ema_decay=0.9 * ema), donate_argnums=0)
    step(state, jnp.ones((2, 5)))
    assert state.params["mean"].is_deleted()
    assert params["mean"].tolist() == [*range(5)] and jax.random.key_data(key).tolist() == [0, 3]

    state, strategy = init_train_state(params, optimizer, key), single()
    moved = strategy.shard_state(state)
    strategy.step(quadratic, optimizer)(moved, jnp.ones((2, 5)))
    assert moved.params["mean"].is_deleted() and not state.params["mean"].is_deleted()
    assert jax.random.key_data(state.rng).tolist() == [0, 3]


VALUED = {
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=2)),
    "line search": optax.lbfgs,
    "lbfgs": lambda: optax.lbfgs(linesearch=None),
}


@pytest.mark.parametrize("name", VALUED)
def test_an_optimizer_that_needs_the_value_of_the_loss_gets_it(name):
    batch, optimizer = jnp.linspace(-1.0, 3.0, 20).reshape(4, 5), VALUED[name]()

    def loss(params, batch, rng):
        nats, count = quadratic(params, batch, rng)
        return nats + batch.size * jnp.sum(params["mean"] ** 4), count

    found = []
    for parts in (1, 2):
        step = jax.jit(make_train_step(loss, optimizer, grad_accumulation=parts))
        state = init_train_state({"mean": jnp.full(5, 2.0)}, optimizer, jax.random.key(0))
        losses = []
        for _ in range(4):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.9 * losses[0]
        found.append(losses)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    moved = single().shard_state(
        init_train_state({"mean": jnp.full(5, 2.0)}, optimizer, jax.random.key(0))
    )
    _, metrics = single().step(loss, optimizer)(moved, batch)
    assert float(metrics["loss"]) == pytest.approx(found[0][0], rel=1e-5)


def test_a_line_search_over_devices_is_refused_by_its_name():
    step = make_train_step(quadratic, optax.lbfgs(), reduce=lambda sums: sums)
    state = init_train_state({"mean": jnp.zeros(5)}, optax.lbfgs(), jax.random.key(0))
    with pytest.raises(ConfigError, match=r"optax\.lbfgs\(linesearch=None\)"):
        step(state, jnp.ones((4, 5)))


@pytest.mark.parametrize("parts", [1, 4])
def test_one_batch_or_four_parts_with_auxiliary_sums_make_one_step(whole, parts):
    expected, sums = whole
    step = make_train_step(bigram_with_sums, SGD, grad_accumulation=parts)
    update, metrics = updated(step, ragged_batch(), bigram(), SGD)
    assert metrics.keys() == sums.keys() | {"correct", "size"}
    assert relative(update, expected) < 1e-6
    assert_same_metrics(metrics, sums)
    auxiliary = jax.jit(bigram_with_sums)(bigram(), ragged_batch(), None)[2]
    assert metrics["correct"] == auxiliary["correct"] > 0
    np.testing.assert_allclose(metrics["size"], auxiliary["size"], rtol=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda s, n: s,
            r"the loss returned float32\[\]",
        ),
        (lambda s, n: s / n, "return sums, not means"),
        (lambda s, n: (s, n, n), r"returned \('float32\[\]', 'float32\[\]', 'float32\[\]'\)"),
        (lambda s, n: (s * jnp.ones(3), n), r"returned \('float32\[3\]', 'float32\[\]'\)"),
        (lambda s, n: (s, {"tokens": n}), "but it must return"),
        (lambda s, n: (s, n, {"correct": n * jnp.ones(2)}), r"'correct': 'float32\[2\]'"),
        (lambda s, n: (s, n, {"grad_norm": s}), "'grad_norm'"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(returned, message):
    def loss(params, batch, rng):
        return returned(*bigram_loss(params, batch, rng))

    state = init_train_state(bigram(), SGD, jax.random.key(3))
    for parts in (1, 4):
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(
                make_train_step(loss, SGD, grad_accumulation=parts), state, ragged_batch()
            )
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(make_eval_step(loss), bigram(), ragged_batch())


@pytest.mark.parametrize(
    ("ema", "decay", "message"),
    [
        (True, 0.0, "ema_decay=0.0"),
        (False, 0.9, "ema_decay=0.9"),
        (True, 1.0, "ema_decay=1.0"),
    ],
)
def test_an_average_without_a_decay_and_a_decay_without_an_average_are_refused(ema, decay, message):
    state = init_train_state(bigram(), SGD, jax.random.key(3), ema=ema)
    with pytest.raises(ConfigError, match=message):
        step = make_train_step(bigram_loss, SGD, ema_decay=decay)
        jax.eval_shape(step, state, ragged_batch())


@pytest.mark.parametrize(
    ("decay", "used"), [(0.9999, (1 / 10, 2 / 11, 3 / 12)), (0.15, (0.1, 0.15, 0.15))]
)
def test_a_short_trainings_average_forgets_its_first_parameters_also_with_a_large_decay(
    decay, used
):
    adam = make_optimizer(OptimizerConfig("constant", learning_rate=0.01, warmup_steps=0))
    step = jax.jit(make_train_step(bigram_loss, adam, ema_decay=decay))
    state, expected = init_train_state(bigram(), adam, jax.random.key(3), ema=True), bigram()
    for number, share in enumerate(used):
        state, _ = step(state, ragged_batch(seed=number))
        new = jax.tree.map(np.asarray, state.params)
        expected = {name: share * old + (1 - share) * new[name] for name, old in expected.items()}
    assert relative(state.ema, expected) < 1e-6
    assert relative(state.ema, state.params) > 1e-3


def test_a_batch_without_tokens_changes_nothing():
    empty = jax.tree.map(np.zeros_like, ragged_batch())
    update, metrics = updated(make_train_step(bigram_loss, SGD), empty, bigram(), SGD)
    assert norm(update) == 0.0
    assert all(value == 0.0 for value in metrics.values())


@jax.custom_vjp
def with_gradient_plus(leaf, amount):
    """`leaf`, whose gradient grows by `amount` on its way back."""
    return leaf


with_gradient_plus.defvjp(
    lambda leaf, amount: (leaf, amount), lambda amount, grad: (grad + amount, jnp.zeros(()))
)


class PoisonedBatch(NamedTuple):
    """A batch with a number of each row that `poisoned` adds."""

    source: np.ndarray
    target: np.ndarray
    example_ids: np.ndarray
    poison: np.ndarray


def poisoned_batch(value, seed=0):
    return PoisonedBatch(*ragged_batch(seed=seed), np.where(np.arange(16) == 3, value, 0.0))


def poisoned(where):
    """The bigram's loss with the batch's poison in the loss or in one gradient."""

    def loss(params, batch, rng):
        amount = jnp.float32(batch.poison).sum()
        if where == "gradient":
            params = {**params, "bias": with_gradient_plus(params["bias"], amount)}
        total, tokens = bigram_loss(params, batch, rng)
        return total + (amount if where == "loss" else 0.0), tokens

    return loss


def as_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def learned(state):
    return as_bytes((state.params, state.opt_state, state.ema))


ADAM = make_optimizer(OptimizerConfig("constant", learning_rate=0.01, warmup_steps=0))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_only_the_counters(where, parts):
    step = make_train_step(poisoned(where), ADAM, grad_accumulation=parts, ema_decay=0.9)
    step = jax.jit(step)
    start = init_train_state(bigram(), ADAM, jax.random.key(3), ema=True)
    start, _ = step(start, poisoned_batch(0.0))
    state = start
    for number, value in enumerate((np.nan, np.inf, -np.inf), 1):
        state, metrics = step(state, poisoned_batch(value))
        assert learned(state) == learned(start)
        assert (state.step, state.skipped, state.consecutive_skips) == (1 + number, number, number)
        assert metrics["skipped"] == metrics["consecutive_skips"] == number
        assert not np.isfinite(metrics["loss" if where == "loss" else "grad_norm"])
    state, metrics = step(state, poisoned_batch(0.0))
    assert learned(state) != learned(start)
    assert (metrics["skipped"], metrics["consecutive_skips"]) == (3, 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))


def test_training_ends_after_ten_steps_in_a_row_that_are_not_finite():
    step = jax.jit(make_train_step(poisoned("loss"), ADAM))
    state = init_train_state(bigram(), ADAM, jax.random.key(3))
    for number, value in enumerate([np.nan] * 9 + [0.0] + [np.nan] * 10, 1):
        state, metrics = step(state, poisoned_batch(value))
        if number < 20:
            raise_if_diverged(number, metrics)
    with pytest.raises(Diverged, match=r"step 20 \(loss nan, "):
        raise_if_diverged(20, metrics)
    with pytest.raises(Diverged, match="10 steps"):
        raise_if_diverged(20, metrics, patience=3)
    raise_if_diverged(20, metrics, patience=11)


def test_a_batch_that_does_not_divide_is_refused():
    step = make_train_step(bigram_loss, SGD, grad_accumulation=3)
    state = init_train_state(bigram(), SGD, jax.random.key(3))
    with pytest.raises(ValueError, match="grad_accumulation=3"):
        jax.eval_shape(step, state, ragged_batch())


def test_the_evaluation_step_is_the_loss_without_dropout():
    batch, params = ragged_batch(), bigram()
    metrics = jax.jit(make_eval_step(bigram_with_sums))(params, batch)
    inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
    logits = params["table"][inputs] + params["bias"]
    expected = cross_entropy(jnp.asarray(logits), labels, labels != PAD, 0.1)
    np.testing.assert_allclose((metrics["loss"], metrics["tokens"]), expected, rtol=1e-6)
    auxiliary = jax.jit(bigram_with_sums)(params, batch, None)[2]
    assert metrics.keys() == {"loss", "tokens", *auxiliary}
    for name, value in auxiliary.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
