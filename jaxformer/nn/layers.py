"""The parts of a block besides attention: embeddings, norms, dropout, the feed-forward network."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxformer.config.transformer import Activation
from jaxformer.ops.dense import Dense, QuantizedMatrix, add_bias, logits_matmul, weights
from jaxformer.ops.dropout import DropoutMask, DropoutRng, as_dropout_rng
from jaxformer.ops.lookup import lookup
from jaxformer.ops.masks import AnyArray

Initializer = nn.initializers.Initializer


def softcap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap * tanh(x / cap), which is near small `x` and at most `cap` (Gemma 2)."""
    return cap * jnp.tanh(x / cap)


INTERMEDIATES = "intermediates"
"""The collection in which values are recorded if it is mutable."""
REPLACEMENTS = "replacements"
"""The collection that holds a function for each value to replace (see `inspection`)."""


def tap(module: nn.Module, name: str, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x`, or what replaces the value `name` of `module`; recorded if asked.

    >>> class Doubled(nn.Module):
    ...     def __call__(self, x):
    ...         return tap(self, "doubled", 2 * x)
    >>> _, values = jf.read_taps(Doubled(), {}, jnp.array([1.0, 3.0]))
    >>> values["doubled"]
    Array([2., 6.], dtype=float32)
    """
    if module.has_variable(REPLACEMENTS, name):
        x = module.get_variable(REPLACEMENTS, name)(x)
    module.sow(INTERMEDIATES, name, x)
    return x


def recompute_on_gpu(
    function: Callable[..., Array],
    *arrays: Array,
    gpu_twin: Callable[..., Array] | None = None,
) -> Array:
    """`function(*arrays)`, whose derivative on a GPU starts from `arrays`.

    Otherwise XLA for a GPU keeps what the forward pass has computed, such as tanh of a hidden layer
    and normalised rows in float32: in GPT-2's training step it wrote and read a twentieth more.
    A GPU computes `gpu_twin`, where one is given, in place of `function`.
    """
    again = jax.checkpoint(gpu_twin or function)
    return jax.lax.platform_dependent(*arrays, cuda=again, default=function)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the cumulative normal distribution of x (Hendrycks & Gimpel 2016), by erf.

    The error is below 1e-7 of x. `jax.nn.gelu` uses erfc, which is exact for large negative x and
    takes twice the time on a CPU.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(recompute_on_gpu, gelu),
    "gelu_tanh": partial(recompute_on_gpu, partial(jax.nn.gelu, approximate=True)),
    "silu": partial(recompute_on_gpu, jax.nn.silu),
}
"""The functions that `FeedForwardOptions.activation` names; their plain twins are jax.nn's."""


class Dropout(nn.Module):
    """Dropout whose mask depends on the place in the model and on the example (`DropoutRng`)."""

    rate: float
    place: str
    """The name of the place within the parent module."""

    def __call__(
        self, x: Float[Array, "B ... F"], rng: DropoutRng | jax.Array | None
    ) -> Float[Array, "B ... F"]:
        """`x` with a share `rate` of its elements set to zero; `x` itself without `rng`."""
        dropout = self.at(rng, len(x)) if self.rate else None
        return x if dropout is None else dropout(x)

    def at(self, rng: DropoutRng | jax.Array | None, rows: int) -> DropoutMask | None:
        """Dropout of `rows` rows at this place as a function; None where nothing is dropped.

        A key alone numbers the rows. Raises `ValueError` for a key in `rngs` without `rng`.
        """
        if rng is None and self.has_rng("dropout") and not self.is_initializing():
            raise ValueError(
                'rngs={"dropout": key} was given, but these modules take the argument dropout_rng: '
                "give dropout_rng=key, or DropoutRng(key, example_ids), or a dropout rate "
                "of 0"
            )
        rng = as_dropout_rng(rng, rows)
        place = "/".join((*self.path[:-1], self.place))
        return None if rng is None else DropoutMask(rng, place, self.rate)


class Embedding(nn.Module):
    """A `table` [V, D] that maps ids to vectors and, transposed, vectors to logits (section 3.4).

    >>> embedding = Embedding(vocab_size=5, d_model=4)
    >>> table = jnp.arange(20.0).reshape(5, 4)
    >>> vectors = embedding.apply({"params": {"table": table}}, jnp.array([[3, 0]]))
    >>> vectors[0, 0]  # row 3, times sqrt(4)
    Array([24., 26., 28., 30.], dtype=float32)
    """

    AXES: ClassVar[Mapping[str, str]] = {"table": "vocab -> embed"}

    vocab_size: int
    d_model: int
    scale: bool = True
    """Vectors are multiplied by the square root of D."""
    zero_id: int | None = None
    """The id whose vector is zero, whatever its row of the table; None: none."""
    table_init: Initializer | None = None
    """The initializer of the table; None: normal with the deviation D^-0.5."""
    dtype: Any = jnp.float32

    def setup(self) -> None:
        if not (self.is_mutable_collection("params") or self.has_variable("params", "table")):
            raise ValueError(
                f"the variables given have no parameter {'/'.join((*self.path, 'table'))}: call "
                'model.apply({"params": params}, ...) with params = model.init(...)["params"]'
            )
        init = self.table_init or nn.initializers.normal(self.d_model**-0.5)
        shape = self.vocab_size, self.d_model
        self.table: Any = weights(self, "table", init, shape)

    def __call__(
        self, ids: Int[AnyArray, "*shape"] | Float[AnyArray, "*shape D"]
    ) -> Float[Array, "*shape D"]:
        """The vectors of `ids`, or vectors as they are.

        Raises `ValueError` for ids outside the table, unless they are traced.
        """
        if jnp.issubdtype(ids.dtype, jnp.floating):
            return jnp.asarray(ids, self.dtype)
        if not isinstance(ids, Tracer):
            self._check_ids(ids)
        if isinstance(self.table, QuantizedMatrix):
            vectors = self.table.rows(ids).astype(self.dtype)
        else:
            vectors = lookup(self.table, ids, self.dtype)
        if self.zero_id is not None:
            vectors = jnp.where(jnp.equal(ids, self.zero_id)[..., None], 0.0, vectors)
        return vectors * math.sqrt(self.d_model) if self.scale else vectors

    def _check_ids(self, ids: Int[AnyArray, "*shape"]) -> None:
        if not getattr(ids, "is_fully_addressable", True):
            return
        ids = np.asarray(ids)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"id {outside[0]} was given to {self.name!r}, which has vocab_size="
                f"{self.vocab_size}: give ids from 0 to {self.vocab_size - 1}, or a larger "
                "vocabulary"
            )


class LMHead(nn.Module):
    """Maps vectors to logits by its own matrix `kernel` [D, V], or by a tied embedding.

    >>> head, x = LMHead(vocab_size=11), jnp.ones((2, 5, 8))
    >>> logits, variables = head.init_with_output(jax.random.key(0), x)
    >>> logits.shape, variables["params"]["kernel"].shape
    ((2, 5, 11), (8, 11))
    """

    AXES: ClassVar[Mapping[str, str]] = {"kernel": "embed -> vocab", "bias": "vocab"}

    vocab_size: int
    use_bias: bool = False
    softcap: float | None = None
    """Logits x become c tanh(x / c) with this c; None: they stay."""
    kernel_init: Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "*shape D"], embedding: Embedding | None = None
    ) -> Float[Array, "*shape V"]:
        """The logits of `hidden`, by the transpose of `embedding` where one is given."""
        if embedding is None:
            shape = hidden.shape[-1], self.vocab_size
            matrix = weights(self, "kernel", self.kernel_init, shape)
        else:
            matrix = embedding.table.T
        logits = logits_matmul(hidden, matrix)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,), jnp.float32)
            logits = add_bias(logits, bias)
        return logits if self.softcap is None else softcap(logits, self.softcap)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last axis.

    >>> out, _ = Norm().init_with_output(jax.random.key(0), jnp.array([[3.0, 7.0]]))
    >>> out.round(3)  # mean 5, deviation 2
    Array([[-1.,  1.]], dtype=float32)
    """

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    use_bias: bool = True
    """A LayerNorm has a bias."""

    @nn.compact
    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """`x` normalised in float32, scaled and shifted, in the type of `x`."""
        size = x.shape[-1:]
        vectors = [self.param("scale", nn.initializers.ones, size, jnp.float32)]
        if self.kind == "layer" and self.use_bias:
            vectors.append(self.param("bias", nn.initializers.zeros, size, jnp.float32))

        def of_rows(x: Array, *vectors: Array) -> Array:
            as_row = partial(jnp.expand_dims, axis=tuple(range(x.ndim - 1)))
            y, _ = normalize(x.astype(jnp.float32), self.eps, self.kind == "layer")
            y = y * as_row(vectors[0])
            return (y + as_row(vectors[1]) if len(vectors) > 1 else y).astype(x.dtype)

        def of_one_row(x: Array, *vectors: Array) -> Array:
            # XLA for a GPU makes one kernel of a norm, but three if it has one row alone.
            rows = x.reshape(1, -1) + np.array([[0], [1]], x.dtype)
            return jax.lax.slice_in_dim(of_rows(rows, *vectors), 0, 1).reshape(x.shape)

        twin = of_one_row if x.size == size[0] else None
        return recompute_on_gpu(of_rows, x, *vectors, gpu_twin=twin)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def normalize(
    x: Float[Array, "*shape D"], eps: float, centered: bool
) -> tuple[Float[Array, "*shape D"], Float[Array, "*shape 1"]]:
    """(x - mean) / sqrt(variance + eps) over the last axis, and 1 / sqrt(variance + eps).

    Without the mean if not `centered`. The derivative is written out. With the automatic one, XLA
    on a CPU recomputes the residual sums of all later layers in each weight gradient, which costs
    time quadratic in depth.
    """
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


@normalize.defjvp
def _normalize_jvp(eps, centered, primals, tangents):
    (x,), (dx,) = primals, tangents
    y, inverse = normalize(x, eps, centered)
    along = jnp.mean(y * dx, axis=-1, keepdims=True)
    dy = dx - y * along
    if centered:
        dy = dy - jnp.mean(dx, axis=-1, keepdims=True)
    return (y, inverse), (dy * inverse, -along * inverse * inverse)


class FeedForward(nn.Module):
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

    d_ff: int
    activation: Activation = "relu"
    gated: bool = False
    dropout_rate: float = 0.0
    """Dropout on the hidden layer."""
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of the projection into the residual; None: `kernel_init`."""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], dropout_rng: DropoutRng | None = None
    ) -> Float[Array, "B T D"]:
        """FFN(x), through a hidden layer [B, T, F]."""
        project = partial(
            Dense, use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype
        )
        hidden = project(self.d_ff, name="gate" if self.gated else "up")(x)
        hidden = ACTIVATIONS[self.activation](hidden)
        if self.gated:
            hidden = hidden * project(self.d_ff, name="up")(x)
        hidden = tap(self, "hidden", hidden)
        if self.dropout_rate:
            hidden = Dropout(self.dropout_rate, "hidden")(hidden, dropout_rng)
        out_init = self.out_init or self.kernel_init
        return tap(self, "output", project(x.shape[-1], kernel_init=out_init, name="down")(hidden))
