"""The state of a search or a sampling: sentences that are being decoded, and the loop over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from jaxformer.decoding.logits_processors import LogitsProcessor
from jaxformer.decoding.settings import LogitsConfig
from jaxformer.ops.masks import AnyArray
from jaxformer.ops.rows import put_rows_into, take_rows_of

State = TypeVar("State", bound=Any)
Config = TypeVar("Config", bound=LogitsConfig)


@dataclass(frozen=True)
class Rules:
    """Static arguments of a search: its settings without their `VALUES`, and functions."""

    config: Any
    eos: tuple[int, ...]
    logits_processors: tuple[LogitsProcessor, ...]


class DecodeState(struct.PyTreeNode):
    """B sentences that are being decoded.

    `values` are the sentences' own settings, by the name of the field (`VALUES`). `lengths` says
    how many tokens are written; `limits` are the most new ones. `last` are the tokens of the last
    step.
    """

    cache: Any
    values: Mapping[str, Shaped[AnyArray, " B"]]
    limits: Int[Array, " B"]
    lengths: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    last: Int[Array, "B ..."]
    rules: Rules = struct.field(pytree_node=False)


def row_values(config: LogitsConfig, batch: int) -> dict[str, Shaped[np.ndarray, " B"]]:
    """The fields `VALUES` of `config` as one number per sentence."""

    def column(name: str) -> Shaped[np.ndarray, " B"]:
        is_float = isinstance(getattr(type(config), name), float)  # its default
        return np.full(batch, getattr(config, name), np.float32 if is_float else np.int32)

    return {name: column(name) for name in config.VALUES}


def without_values(config: Config) -> Config:
    """`config` with the defaults of its fields `VALUES`, of which a program does not depend."""
    return replace(config, **{name: getattr(type(config), name) for name in config.VALUES})


def advance_until(
    advance: Callable[[State], State],
    state: State,
    count: Int[Array, ""] | int,
    ended: Int[Array, ""] | int | None,
) -> State:
    """`state` after `advance` was called up to `count` times.

    It is called until `ended` of the sentences have stopped; None: until all have.
    """
    enough = len(state.stopped) if ended is None else ended

    def goes_on(carry: tuple[Array, State]) -> Bool[Array, ""]:
        done, state = carry
        return (done < count) & (state.stopped.sum() < enough)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, advance(carry[1])

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]


def take_rows(tree: Any, rows: Int[AnyArray, " K"]) -> Any:
    """The sentences `rows` of a state or cache, whose leaves have the axis B first.

    A number holds for all sentences. A node with a method `take_rows(rows)` does it itself.
    """

    def take(x: Any) -> Any:
        return x.take_rows(rows) if hasattr(x, "take_rows") else take_rows_of(x, rows)

    return jax.tree.map(take, tree, is_leaf=lambda x: hasattr(x, "take_rows"))


def put_rows(tree: Any, rows: Int[AnyArray, " K"], new: Any) -> Any:
    """`tree` with the K sentences of `new` in `rows`; a row outside of it is left out.

    A node with a method `put_rows(rows, new)` does it itself. Raises `ValueError` for a number of
    all sentences, such as the length of a cache from `init_cache`.
    """

    def put(x: Any, y: Any) -> Any:
        return x.put_rows(rows, y) if hasattr(x, "put_rows") else put_rows_into(x, rows, y)

    return jax.tree.map(put, tree, new, is_leaf=lambda x: hasattr(x, "put_rows"))
