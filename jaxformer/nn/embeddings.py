"""Ids to vectors, and vectors to logits."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxformer.config.checks import Count, Natural, Positive
from jaxformer.config.transformer import check_zero_id
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Initializer, float_or_quantized
from jaxformer.ops.dense import add_bias, logits_matmul
from jaxformer.ops.lookup import lookup
from jaxformer.ops.masks import AnyArray


class Embedding(CheckedModule):
    """A `table` [V, D] that maps ids to vectors and, transposed, vectors to logits (section 3.4).

    >>> embedding = Embedding(vocab_size=5, d_model=4)
    >>> table = jnp.arange(20.0).reshape(5, 4)
    >>> vectors = embedding.apply({"params": {"table": table}}, jnp.array([[3, 0]]))
    >>> vectors[0, 0]  # row 3, times sqrt(4)
    Array([24., 26., 28., 30.], dtype=float32)
    """

    AXES: ClassVar[Mapping[str, str]] = {"table": "vocab -> embed"}

    vocab_size: Count
    d_model: Count
    scale: bool = True
    """Vectors are multiplied by the square root of D."""
    zero_id: Natural | None = None
    """The id whose vector is zero, whatever its row of the table; None: none."""
    table_init: Initializer | None = None
    """The initializer of the table; None: normal with the deviation D^-0.5."""
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_zero_id(self.zero_id, self.vocab_size)

    def setup(self) -> None:
        if not (self.is_mutable_collection("params") or self.has_variable("params", "table")):
            raise ValueError(
                f"the variables given have no parameter {'/'.join((*self.path, 'table'))}: call "
                'model.apply({"params": params}, ...) with params = model.init(...)["params"]'
            )
        init = self.table_init or nn.initializers.normal(self.d_model**-0.5)
        shape = self.vocab_size, self.d_model
        self.table: Any = float_or_quantized(self, "table", init, shape)

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


class LMHead(CheckedModule):
    """Maps vectors to logits by its own matrix `kernel` [D, V], or by a tied embedding.

    >>> head, x = LMHead(vocab_size=11), jnp.ones((2, 5, 8))
    >>> logits, variables = head.init_with_output(jax.random.key(0), x)
    >>> logits.shape, variables["params"]["kernel"].shape
    ((2, 5, 11), (8, 11))
    """

    AXES: ClassVar[Mapping[str, str]] = {"kernel": "embed -> vocab", "bias": "vocab"}

    vocab_size: Count
    use_bias: bool = False
    softcap: Positive | None = None
    """Logits x become c tanh(x / c) with this c; None: they stay."""
    kernel_init: Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "*shape D"], embedding: Embedding | None = None
    ) -> Float[Array, "*shape V"]:
        """The logits of `hidden`, by the transpose of `embedding` where one is given."""
        if embedding is None:
            shape = hidden.shape[-1], self.vocab_size
            matrix = float_or_quantized(self, "kernel", self.kernel_init, shape)
        else:
            matrix = embedding.table.T
        logits = logits_matmul(hidden, matrix)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,), jnp.float32)
            logits = add_bias(logits, bias)
        return logits if self.softcap is None else softcap(logits, self.softcap)


def softcap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap * tanh(x / cap), which is near small `x` and at most `cap` (Gemma 2)."""
    return cap * jnp.tanh(x / cap)
