"""The balance of experts: a loss that is smallest where all experts get equally many tokens."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.errors import ConfigError
from jaxformer.ops.partitioning import sum_over_devices

TokenMasks = Mapping[str, Bool[Array, "B T"]]
"""True at the tokens that count, by the name of the part of the model whose tokens they are.

The name is the first word of the path of its modules; "" stands for all other parts."""


def balance_sum(
    routing: Mapping[str, Any], masks: TokenMasks, tokens: Float[Array, ""]
) -> Float[Array, ""]:
    """The balance of experts times the number of `tokens`: a sum over the rows of this device.

    The balance of a layer is E times the sum over its experts of (share of all choices) x (mean
    share that the router gives), as in Fedus et al. 2022, equation 4: 1 where all experts are
    chosen equally often, and E where all tokens choose one. The result is the mean over layers.
    `routing` is the collection that `Experts` record (`jaxformer.nn.experts.ROUTING`).

    Shares of choices are taken over the whole batch, on all devices whose parts of it a program
    sees as one (`sum_over_devices`). They have no gradient. With gradient accumulation the batch is
    each part. Raises `ConfigError` where no experts were recorded.
    """
    layers = _by_layer(routing)
    if not layers:
        raise ConfigError(
            "a balance of experts was asked for, but the model has none: give experts to its "
            "feed-forward options, or leave balance out"
        )
    all_tokens = sum_over_devices(tokens)
    balances = []
    for path, (shares, experts) in layers.items():
        mask = masks.get(path.partition("/")[0], masks.get(""))
        if mask is None:
            raise ConfigError(f"no mask says which tokens of {path} count: give one named ''")
        count = shares.shape[-1]
        real = mask.astype(jnp.float32)
        chosen = jax.nn.one_hot(experts, count).sum(-2)  # [..., B, T, E], with layers before
        choices = sum_over_devices(jnp.einsum("...bte,bt->...e", chosen, real))
        positions = sum_over_devices(jnp.sum(real))
        frequency = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)
        given = jnp.einsum("...bte,bt,...e->...", shares, real, frequency)
        balances.append(count * given / jnp.maximum(positions, 1.0))
    mean = jnp.mean(jnp.concatenate([jnp.ravel(balance) for balance in balances]))
    return mean * all_tokens


def _by_layer(routing: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
    """The shares and the choices of each call of a router, by the path of its module."""
    if "shares" in routing:
        calls = zip(routing["shares"], routing["experts"], strict=True)
        return {str(number): call for number, call in enumerate(calls)}
    return {
        f"{name}/{path}": call
        for name, inner in routing.items()
        for path, call in _by_layer(inner).items()
    }
