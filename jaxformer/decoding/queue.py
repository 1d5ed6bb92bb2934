"""Rows of a batch that texts enter when others have ended, as in continuous batching."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

State = TypeVar("State", bound=Any)


class Queue(struct.PyTreeNode):
    """N texts that wait for one of R = `rows` rows, for a search in the place of their cache.

    `begin(numbers [K])` returns the cache of K texts. `count`: how many of the N texts are decoded,
    more than R. When an eighth of the rows has ended, as many of the next texts enter them. What a
    text becomes does not depend on its row and on the time when it enters.

    Caches need the methods `as_ring()` and `enter(rows [K], cache)` of `jaxformer.nn.cache.Cache`.
    """

    begin: Callable[[Int[Array, " K"]], Any]
    count: Int[Array, ""]
    rows: int = struct.field(pytree_node=False)

    @property
    def entering(self) -> int:
        """K, the number of texts that enter together; a cache has an axis for two and more."""
        return max(2, self.rows // 8)


def run_to_end(
    begin: Callable[[Any, Any], State],
    advance: Callable[[State], State],
    texts: Any,
    cache: Any,
    result: Callable[[State], Any],
) -> Any:
    """The `result` of each of `texts`, arrays [N, ...], decoded until they have stopped.

    `begin(texts, cache)` is the state before the first token, `advance(state)` that with one more.
    """
    if not isinstance(cache, Queue):
        state = begin(texts, cache)
        return result(jax.lax.while_loop(lambda state: ~state.stopped.all(), advance, state))

    def fresh(numbers):
        return begin(jax.tree.map(lambda x: x[numbers], texts), cache.begin(numbers))

    def refill(carry):
        state, numbers, entered, results = carry
        rows = jnp.argsort(~state.stopped)[: cache.entering]
        new = entered + jnp.arange(cache.entering)
        state, numbers = _enter(state, rows, fresh(new)), numbers.at[rows].set(new)
        entered += cache.entering
        # After the last texts have entered, all run to their ends.
        enough = jnp.where(entered < cache.count, cache.entering, cache.rows)
        state = jax.lax.while_loop(lambda state: state.stopped.sum() < enough, advance, state)
        results = jax.tree.map(
            lambda x, new: x.at[numbers].set(new, mode="drop"), results, result(state)
        )
        return state, numbers, entered, results

    shapes = jax.eval_shape(fresh, jnp.arange(cache.rows))
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    empty = empty._replace(stopped=jnp.ones(cache.rows, bool), cache=empty.cache.as_ring())
    size = len(jax.tree.leaves(texts)[0])
    results = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), result(empty))
    carry = empty, jnp.full(cache.rows, size), jnp.zeros((), jnp.int32), results
    return jax.lax.while_loop(lambda carry: carry[2] < cache.count, refill, carry)[-1]


def _enter(state: State, rows: Int[Array, " K"], new: State) -> State:
    """`state` with the K texts of `new` in `rows`."""
    cache = state.cache.enter(rows, new.cache)
    arrays = state._replace(cache=None), new._replace(cache=None)
    return jax.tree.map(lambda x, y: x.at[rows].set(y), *arrays)._replace(cache=cache)
