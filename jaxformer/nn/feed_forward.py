"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import Count, UnitInterval
from jaxformer.config.transformer import Activation
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Dense, Initializer
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.taps import tap
from jaxformer.ops.activations import find_activation
from jaxformer.ops.dropout import DropoutRng


class FeedForward(CheckedModule):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, position by position (section 3.3).

    Gated (Shazeer 2020): the activation of one projection multiplies another.

    >>> x = jnp.ones((2, 3, 4))
    >>> out, variables = jf.FeedForward(d_ff=6).init_with_output(jax.random.key(0), x)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))  # 4 x 6 + 6 and 6 x 4 + 4
    58
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "gate/kernel": "embed -> mlp",
        "gate/bias": "mlp",
        "up/kernel": "embed -> mlp",
        "up/bias": "mlp",
        "down/kernel": "mlp -> embed",
        "down/bias": "embed",
    }

    d_ff: Count
    activation: Activation | Callable[[Array], Array] = "relu"
    """The name of an activation, or a function."""
    gated: bool = False
    dropout_rate: UnitInterval = 0.0
    """Dropout on the hidden layer."""
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of the projection into the residual; None: `kernel_init`."""
    dtype: Any = jnp.float32

    def setup(self) -> None:
        dense = partial(Dense, use_bias=self.use_bias, dtype=self.dtype)
        if self.gated:
            self.gate: Dense = dense(self.d_ff, kernel_init=self.kernel_init)
        self.up: Dense = dense(self.d_ff, kernel_init=self.kernel_init)
        self.down: Dense = dense(kernel_init=self.out_init or self.kernel_init)
        self.dropout: Dropout = Dropout(self.dropout_rate, "hidden")

    def __call__(
        self, x: Float[Array, "B T D"], dropout_rng: DropoutRng | Array | None = None
    ) -> Float[Array, "B T D"]:
        """FFN(x), through a hidden layer [B, T, F]."""
        activation = find_activation(self.activation)
        if self.gated:
            hidden = activation(self.gate(x)) * self.up(x)
        else:
            hidden = activation(self.up(x))
        hidden = self.dropout(tap(self, "hidden", hidden), dropout_rng)
        return tap(self, "output", self.down(hidden, x.shape[-1]))
