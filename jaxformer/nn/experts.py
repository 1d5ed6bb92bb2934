"""A feed-forward network of experts, among which a router chooses for each token."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import Count, Positive, UnitInterval
from jaxformer.config.transformer import Activation, Dispatch, check_experts
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Initializer
from jaxformer.nn.dropout import Dropout, dropout_rng_of
from jaxformer.nn.feed_forward import FeedForward
from jaxformer.nn.taps import tap
from jaxformer.ops.activations import find_activation
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.experts import Choice, ExpertLayer, Multiply, mix_experts

ROUTING = "routing"
"""The collection in which the shares and the choices of each router are recorded if it is mutable.

A loss with a balance of experts reads it (see `causal_loss`)."""


class Experts(CheckedModule):
    """y = sum over the chosen experts e of w_e(x) FFN_e(x), position by position.

    The router's shares are p(x) = softmax(x W_r). A token chooses the k experts with the largest
    shares; their shares are its weights w, or with `normalize` the shares divided by their sum
    (Shazeer et al. 2017; Jiang et al. 2024, section 2.1). It is called as `FeedForward` is, and
    made from the same fields and its own.

    >>> x = jnp.ones((2, 3, 4))
    >>> experts = jf.Experts(d_ff=6, num_experts=5, top_k=2)
    >>> out, variables = experts.init_with_output(jax.random.key(0), x)
    >>> out.shape, variables["params"]["up"]["kernel"].shape  # five matrices
    ((2, 3, 4), (5, 4, 6))
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "router/kernel": "embed -> router",
        "gate/kernel": "experts embed -> mlp",
        "gate/bias": "experts mlp",
        "up/kernel": "experts embed -> mlp",
        "up/bias": "experts mlp",
        "down/kernel": "experts mlp -> embed",
        "down/bias": "experts embed",
    }

    d_ff: Count
    num_experts: Count = 8
    """E, the number of experts."""
    top_k: Count = 2
    """k, the number of experts of a token."""
    normalize: bool = True
    """The weights of a token's experts add up to 1."""
    shared_d_ff: Count | None = None
    """The size of the hidden layer of a shared expert, which all tokens have; None: no such
    expert."""
    jitter: UnitInterval = 0.0
    """In training the router's logits are multiplied by random numbers from 1 - jitter to
    1 + jitter."""
    capacity_factor: Positive | None = None
    """In training an expert takes at most T k / E times this of a row's T tokens; None: all."""
    dispatch: Dispatch = "auto"
    """How tokens reach their experts, as in `ExpertOptions`."""
    activation: Activation | Callable[[Array], Array] = "relu"
    """The name of an activation, or a function."""
    gated: bool = False
    dropout_rate: UnitInterval = 0.0
    """Dropout on the hidden layer; the experts of a token share its mask."""
    use_bias: bool = True
    """The experts' layers have biases; the router has none."""
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of projections into the residual; None: `kernel_init`."""
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.top_k, self.capacity_factor, self.dispatch)

    def setup(self) -> None:
        layer = partial(ExpertDense, self.num_experts, use_bias=self.use_bias, dtype=self.dtype)
        self.router: Router = Router(self.num_experts, self.kernel_init)
        if self.gated:
            self.gate: ExpertDense = layer(kernel_init=self.kernel_init)
        self.up: ExpertDense = layer(kernel_init=self.kernel_init)
        self.down: ExpertDense = layer(kernel_init=self.out_init or self.kernel_init)
        self.dropout: Dropout = Dropout(self.dropout_rate, "hidden")
        if self.shared_d_ff is not None:
            self.shared: FeedForward = FeedForward(
                self.shared_d_ff,
                activation=self.activation,
                gated=self.gated,
                dropout_rate=self.dropout_rate,
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                out_init=self.out_init,
                dtype=self.dtype,
            )

    def __call__(
        self, x: Float[Array, "B T D"], dropout_rng: DropoutRng | None = None
    ) -> Float[Array, "B T D"]:
        """The weighted sum of the experts of each token, and the shared expert.

        A call with a key is one of training, whatever the rate of dropout is. As in `Dropout` the
        key may be Flax's stream "dropout".
        """
        rng = dropout_rng_of(self, dropout_rng, x)
        y = mix_experts(
            self.network,
            self.layers(x.shape[-1]),
            x.astype(self.dtype),
            self.choose(x, rng),
            keep=self.kept_hidden(x, rng),
            dispatch=self.dispatch,
            slots=None if rng is None else self.slots(x.shape[1]),
        )
        if self.shared_d_ff is not None:
            y = y + self.shared(x, rng)
        return tap(self, "output", y)

    def choose(self, x: Float[Array, "B T D"], rng: DropoutRng | None) -> Choice:
        """The experts of each token and their weights."""
        logits = self.router(x)
        if self.jitter and rng is not None:
            noise = rng.uniform("/".join((*self.path, "jitter")), logits.shape)
            logits = logits * (1.0 + self.jitter * (2.0 * noise - 1.0))
        shares = nn.softmax(tap(self, "router_logits", logits))
        weights, experts = jax.lax.top_k(shares, self.top_k)
        if not self.is_initializing():
            self.sow(ROUTING, "shares", shares)
            self.sow(ROUTING, "experts", experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return Choice(experts, weights)

    def network(self, rows: Array, keep: Array | None, multiply: Multiply) -> Array:
        """FFN_e of each of `rows`, where `multiply` knows the expert e of each."""
        activation = find_activation(self.activation)
        if self.gated:
            hidden = activation(multiply(rows, "gate")) * multiply(rows, "up")
        else:
            hidden = activation(multiply(rows, "up"))
        if keep is not None:
            hidden = hidden * keep
        return multiply(hidden, "down")

    def layers(self, width: int) -> dict[str, ExpertLayer]:
        """The matrices of the experts by the name of their layer."""
        layers = {"up": self.up(width, self.d_ff), "down": self.down(self.d_ff, width)}
        if self.gated:
            layers["gate"] = self.gate(width, self.d_ff)
        return layers

    def kept_hidden(
        self, x: Float[Array, "B T D"], rng: DropoutRng | None
    ) -> Float[Array, "B T F"] | None:
        """The factors of a token's hidden layer: 0 where dropout drops; None without dropout."""
        dropout = self.dropout.at(rng, x)
        return None if dropout is None else dropout(jnp.ones((*x.shape[:2], self.d_ff), self.dtype))

    def slots(self, length: int) -> int | None:
        """The number of tokens of a row that an expert takes in training; None: all."""
        if self.capacity_factor is None:
            return None
        slots = math.ceil(self.capacity_factor * length * self.top_k / self.num_experts)
        return min(slots, length)


class Router(CheckedModule):
    """x W_r in float32: the logits of the experts."""

    num_experts: Count
    kernel_init: Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """The logits of the experts of each token."""
        shape = x.shape[-1], self.num_experts
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        return jnp.matmul(x.astype(jnp.float32), kernel)


class ExpertDense(CheckedModule):
    """The matrices and biases of a dense layer of all experts."""

    num_experts: Count
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: int, outputs: int) -> ExpertLayer:
        """The layer from `inputs` to `outputs` numbers, in `dtype`."""

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            def init_one(key: jax.Array) -> jax.Array:
                return self.kernel_init(key, shape[1:], dtype)

            return jax.vmap(init_one)(jax.random.split(key, shape[0]))

        shape = self.num_experts, inputs, outputs
        kernel = self.param("kernel", init, shape, jnp.float32).astype(self.dtype)
        bias = None
        if self.use_bias:
            zeros = nn.initializers.zeros
            bias = self.param("bias", zeros, (self.num_experts, outputs), jnp.float32)
            bias = bias.astype(self.dtype)
        return ExpertLayer(kernel, bias)
