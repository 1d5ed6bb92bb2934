"""Products with matrices of floats or 8-bit integers, and sums of biases, as XLA computes best."""

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Float, Float32, Int, Int8, Num

from jaxformer.ops.masks import AnyArray
from jaxformer.ops.partitioning import partitioned

# The number of parts of a product of one vector with a matrix. On a CPU, XLA computes the whole
# product on one thread and a batch of parts on several: with 2 cores, JAX 0.10 does so from 2 parts
# on and JAX 0.12 from 4.
_PARTS = 4
_LOW = jnp.dtype("bfloat16"), jnp.dtype("float16")
MIN_ROWS = 8
"""With fewer rows a TPU's compiler multiplies on the vector unit, many times slower."""
GPU_COLUMNS = 128
"""On a GPU, logits whose number 8 does not divide are padded to a multiple of this. On an H200 the
products of GPT-2's 50,257 logits took 55 ms without it, and 21 with 50,304 columns."""
ALIGNED_ROWS = 1024
"""Products of fewer rows, as in a decoding step, take less time than padding the matrix."""


@struct.dataclass
class QuantizedMatrix:
    """A matrix of 8-bit integers with one scale for each of O outputs.

    `values` [O, I] are int8, `scale` [O] is float32. The largest value of each output is 127 or
    -127. The inputs are next to each other: a CPU multiplies other layouts in 32 bits, as a copy.
    """

    values: Array
    scale: Array

    @property
    def T(self) -> "QuantizedMatrix":  # noqa: N802  (the name of an array's transpose)
        """The matrix itself: inputs stay inputs, also where a table is used for logits."""
        return self

    def rows(self, ids: Int[AnyArray, "*shape"]) -> Float32[Array, "*shape I"]:
        """The rows of the outputs `ids`."""
        return jnp.take(self.values, ids, axis=0) * jnp.take(self.scale, ids)[..., None]


@struct.dataclass
class AdaptedMatrix:
    """A matrix with a low-rank product beside it: matrix + scale a b (LoRA, Hu et al. 2022).

    `a` [I, r] and `b` [r, O] are of all inputs and all outputs of `matrix`; `scale` is a number.
    Products with it are added up, so that neither the sum of the two matrices nor its gradient,
    which have the size of `matrix`, are in memory.
    """

    matrix: Array
    a: Array
    b: Array
    scale: Array


def dense(
    x: Num[Array, "..."],
    kernel: Num[Array, "..."] | QuantizedMatrix | AdaptedMatrix,
    num_inputs: int = 1,
) -> Num[Array, "..."]:
    """The product of the last `num_inputs` axes of `x` with the first ones of `kernel`.

    The plain twin is `jnp.tensordot(x, kernel.astype(x.dtype), num_inputs)`: both give the same
    result to rounding. A `QuantizedMatrix` is multiplied by `int8_matmul`; its outputs are one
    axis, in float32. For an `AdaptedMatrix` it is the sum of two products.
    """
    lead = x.shape[: x.ndim - num_inputs]
    size = math.prod(x.shape[x.ndim - num_inputs :])
    vectors = x.reshape(-1, size)
    if isinstance(kernel, QuantizedMatrix):
        return int8_matmul(vectors, kernel).reshape(*lead, -1)
    if isinstance(kernel, AdaptedMatrix):
        a = kernel.a.reshape(*x.shape[x.ndim - num_inputs :], -1)
        scaled = dense(x, a, num_inputs) * kernel.scale.astype(x.dtype)
        out = dense(x, kernel.matrix, num_inputs)
        return out + dense(scaled, kernel.b).reshape(out.shape)
    # Both become matrices: with more axes, XLA on a CPU copies the gradient to transpose it.
    matrix = kernel.astype(x.dtype).reshape(size, -1)
    positions = lead[-1] if lead else 1
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    if positions > 1 and has_mesh and math.prod(partitioned().values()) > 1:
        # Rows times positions could not be divided by position.
        inputs = x.reshape(*lead, size)
        if x.dtype in _LOW and partitioned(("sequence",)).get("sequence", 1) > 1:
            out = _multiply_own_positions(inputs, kernel.reshape(size, -1))
        elif x.dtype in _LOW and partitioned(("tensor",)):
            out = jnp.matmul(inputs, _convert_before(matrix))
        else:
            out = jnp.matmul(inputs, matrix)
    elif vectors.shape[0] == 1 and size % _PARTS == 0:
        out = jax.lax.platform_dependent(
            vectors,
            matrix,
            cpu=_multiply_in_parts,
            tpu=padded_matmul,
            cuda=_multiply_repeated,
            default=jnp.matmul,
        )
    else:
        out = matmul(vectors, matrix)
    return out.reshape(*lead, *kernel.shape[num_inputs:])


@jax.custom_vjp
def _multiply_own_positions(x: Array, matrix: Array) -> Array:
    """`x` times `matrix`, whose gradient is added up in its own type.

    Each device computes it from its own positions. XLA adds them up in the type of the product.
    """
    return _multiply_own_positions_forward(x, matrix)[0]


def _multiply_own_positions_forward(
    x: Array, matrix: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    low = matrix.astype(x.dtype)
    if partitioned(("tensor",)):
        low = _convert_before(low)
    return jnp.matmul(x, low), (x, low, jnp.zeros((), matrix.dtype))


def _multiply_own_positions_backward(
    saved: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array]:
    x, low, like_matrix = saved
    dx, d_matrix = _gradients(x, low, d_out, jnp.matmul)
    return dx, d_matrix.astype(like_matrix.dtype)


_multiply_own_positions.defvjp(_multiply_own_positions_forward, _multiply_own_positions_backward)


@jax.custom_jvp
def _convert_before(matrix: Array) -> Array:
    """`matrix`, converted to 16 bits before its products: XLA would do it in each of them."""
    return jax.lax.optimization_barrier(matrix)


_convert_before.defjvp(lambda primals, tangents: (_convert_before(*primals), *tangents))


def matmul(
    x: Num[Array, "*B R I"], matrix: Num[Array, "*B I O"], **options: Any
) -> Num[Array, "*B R O"]:
    """`jnp.matmul(x, matrix, **options)`, of few rows as an accelerator computes it fastest."""
    if x.shape[-2] >= MIN_ROWS:
        return jnp.matmul(x, matrix, **options)
    return jax.lax.platform_dependent(
        x,
        matrix,
        tpu=partial(padded_matmul, **options),
        cuda=partial(_multiply_repeated, **options),
        default=partial(jnp.matmul, **options),
    )


def padded_matmul(
    x: Num[Array, "*B R I"], matrix: Num[Array, "*B I O"], **options: Any
) -> Num[Array, "*B R O"]:
    """`jnp.matmul` with rows of zeros up to `MIN_ROWS`, as the matrix unit of a TPU takes."""
    rows = x.shape[-2]
    more = [(0, 0)] * (x.ndim - 2) + [(0, max(MIN_ROWS - rows, 0)), (0, 0)]
    return jnp.matmul(jnp.pad(x, more), matrix, **options)[..., :rows, :]


def _multiply_repeated(x: Array, matrix: Array, **options: Any) -> Array:
    """`jnp.matmul`, of one row twice: XLA for a GPU multiplies one row with each row of the matrix,
    and writes and reads a larger matrix again to sum it up.

    Devices that divide the inputs add both rows up, so more than two would send more.
    """
    if x.shape[-2] != 1:
        return jnp.matmul(x, matrix, **options)
    rows = jnp.broadcast_to(x, (*x.shape[:-2], 2, x.shape[-1]))
    return jnp.matmul(rows, matrix, **options)[..., :1, :]


def summed_in_float32(multiply: Callable[..., Array], *arrays: Array) -> Array:
    """`multiply(*arrays)`, a product whose sums and result are float32.

    A CPU multiplies copies in float32: XLA runs only some products of 16-bit numbers there.
    """
    dtypes = set(map(attrgetter("dtype"), arrays))
    is_double = jnp.dtype("float64") in dtypes
    exact = partial(multiply, preferred_element_type=jnp.float64 if is_double else jnp.float32)
    if dtypes.isdisjoint(_LOW):
        return exact(*arrays)

    def on_cpu(*arrays: Array) -> Array:
        return multiply(*(x.astype(jnp.float32) for x in arrays))

    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, default=exact)


def add_bias(x: Float[Array, "..."], bias: Float[Array, "*O"]) -> Float[Array, "..."]:
    """`x` [*R, *O] + `bias`, in the type of `x`; the gradient of `bias` is summed in float32.

    The plain twin is `x + bias.astype(x.dtype)`, whose gradient is summed in the type of `x`. If
    `x` has 16 bits, the sum is a product with ones, except on a GPU: the vector unit of a TPU v5e
    has no addition in bfloat16, and takes 35 times as long.
    """
    return _add_low_bias(x, bias) if x.dtype in _LOW else _add(x, bias)


def _add(x: Array, bias: Array) -> Array:
    return x + jnp.expand_dims(bias.astype(x.dtype), tuple(range(x.ndim - bias.ndim)))


def _add_flat(x: Array, bias: Array) -> Array:
    """`_add` with one axis of outputs: a product of cuBLAS adds a vector at no cost."""
    return _add(_flat(x, bias), bias.reshape(-1)).reshape(x.shape)


def _flat(x: Array, bias: Array) -> Array:
    return x.reshape(*x.shape[: x.ndim - bias.ndim], bias.size)


@jax.custom_vjp
def _add_low_bias(x: Array, bias: Array) -> Array:
    return _add_low_bias_forward(x, bias)[0]


def _add_low_bias_forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return jax.lax.platform_dependent(x, bias, cuda=_add_flat, default=_add), bias


def _add_low_bias_backward(bias: Array, d_out: Array) -> tuple[Array, Array]:
    d_out, sums = jax.lax.platform_dependent(
        d_out, bias, cuda=_sum_columns, default=_multiply_with_ones
    )
    return d_out, sums.reshape(bias.shape).astype(bias.dtype)


_add_low_bias.defvjp(_add_low_bias_forward, _add_low_bias_backward)


def _multiply_with_ones(d_out: Array, bias: Array) -> tuple[Array, Array]:
    """`d_out`, and its sums for each output in float32."""
    # The outputs are one axis, as a product has them: to divide it in heads is a copy on a TPU.
    flat = _flat(d_out, bias)
    ones = jnp.ones((MIN_ROWS, *flat.shape[:-1]), d_out.dtype)
    return d_out, summed_in_float32(partial(jnp.tensordot, axes=flat.ndim - 1), ones, flat)[0]


def _sum_columns(d_out: Array, bias: Array) -> tuple[Array, Array]:
    """As `_multiply_with_ones`."""
    # Without the barrier XLA stores `d_out` a second time: in float32, for the sum.
    d_out = jax.lax.optimization_barrier(d_out)
    flat = _flat(d_out, bias).astype(jnp.float32)
    return d_out, jnp.sum(flat, tuple(range(flat.ndim - 1)))


def logits_matmul(
    x: Float[Array, "... D"], matrix: Float[Array, "D V"] | QuantizedMatrix
) -> Float32[Array, "... V"]:
    """`x` times `matrix` in float32; the plain twin is `x @ matrix` of float32 arrays.

    A `QuantizedMatrix` is multiplied as in `dense`. If `x` has 16 bits, `matrix` is rounded to
    the dtype of `x` once, and so is the gradient of the logits in the backward pass. The sums are
    not rounded: in bfloat16 several of the likeliest tokens would have equal logits. Only where
    they are differentiated, as in a loss, a GPU stores them in the dtype of `x`: reading and
    writing them in float32 was a sixth of what GPT-2's training step moves.
    """
    if isinstance(matrix, QuantizedMatrix):
        return dense(x, matrix)
    # Unlike `dense`, never in parts: parts of a transposed table would be copies.
    if x.dtype in _LOW:
        # Without a reshape a TPU's compiler fuses the gradient of the logits into the products.
        return _low_matmul(x, matrix)
    if math.prod(partitioned().values()) > 1:
        return x @ matrix.astype(x.dtype)  # rows times positions could not be divided by position
    out = x.reshape(-1, matrix.shape[0]) @ matrix.astype(x.dtype)
    return out.reshape(*x.shape[:-1], matrix.shape[1])


@jax.custom_vjp
def _low_matmul(x: Array, matrix: Array) -> Array:
    return _product(x, _convert_before(matrix.astype(x.dtype)))


def _low_matmul_forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    low = _convert_before(matrix.astype(x.dtype))
    return _product(x, low, rounded=True), (x, low, jnp.zeros((), matrix.dtype))


def _low_matmul_backward(saved: tuple[Array, Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, low, like_matrix = saved
    dx, d_matrix = jax.lax.platform_dependent(
        x, low, d_out.astype(x.dtype), cuda=_aligned_gradients, default=_gradients
    )
    return dx, d_matrix.astype(like_matrix.dtype)


_low_matmul.defvjp(_low_matmul_forward, _low_matmul_backward)


def _product(x: Array, matrix: Array, rounded: bool = False) -> Array:
    """x times `matrix`, in float32; `rounded` to their type on a GPU."""
    exact, rows = partial(summed_in_float32, jnp.matmul), math.prod(x.shape[:-1])
    if rows < MIN_ROWS:
        flat = x.reshape(-1, x.shape[-1])
        return summed_in_float32(matmul, flat, matrix).reshape(*x.shape[:-1], -1)

    def on_gpu(x: Array, matrix: Array) -> Array:
        out = (jnp.matmul if rounded else exact)(x, _align(matrix, rows))
        return out[..., : matrix.shape[1]].astype(jnp.float32)

    return jax.lax.platform_dependent(x, matrix, cuda=on_gpu, default=exact)


def _gradients(
    x: Array, matrix: Array, d_out: Array, multiply: Callable[..., Array] | None = None
) -> tuple[Array, Array]:
    """The gradients of `x`, in its type, and of `matrix` in their product, in float32."""
    multiply = multiply or partial(summed_in_float32, jnp.matmul)
    dx = multiply(d_out, matrix.T).astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    return dx, summed_in_float32(partial(jnp.tensordot, axes=(rows, rows)), x, d_out)


def _aligned_gradients(x: Array, matrix: Array, d_out: Array) -> tuple[Array, Array]:
    rows = math.prod(x.shape[:-1])
    # cuBLAS sums in float32 and rounds once: no gradient is written in float32 to be converted.
    dx, d_matrix = _gradients(x, _align(matrix, rows), _align(d_out, rows), jnp.matmul)
    return dx, d_matrix[:, : matrix.shape[1]]


def _align(matrix: Float[Array, "... V"], rows: int) -> Float[Array, "... W"]:
    """`matrix` of a product of `rows`, padded with columns of zeros where that pays."""
    pays = matrix.shape[-1] % 8 and rows >= ALIGNED_ROWS
    more = -matrix.shape[-1] % GPU_COLUMNS if pays else 0
    return jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, more)])


def _multiply_in_parts(vector: Num[Array, "1 I"], matrix: Num[Array, "I O"]) -> Num[Array, "1 O"]:
    """`vector` times `matrix`, as the sum over the parts of I."""
    vector, matrix = vector.reshape(_PARTS, 1, -1), matrix.reshape(_PARTS, -1, matrix.shape[1])
    return summed_in_float32(jnp.matmul, vector, matrix).sum(0).astype(vector.dtype)


def quantize_matrix(matrix: Float[Array, "O I"]) -> QuantizedMatrix:
    """`matrix` in int8 per output, scale max / 127."""
    values, scale = _quantize(matrix)
    return QuantizedMatrix(values, scale[:, 0])


def int8_matmul(x: Float[Array, "R I"], matrix: QuantizedMatrix) -> Float[Array, "R O"]:
    """`x`, each row rounded to 8 bits, times `matrix`; the sums of integers are exact.

    The plain twin is a float product of rows and matrix, both rounded as `quantize_matrix` does.
    """
    values, scale = _quantize(x)
    if len(x) == 1:  # XLA on a CPU takes 20 times as long for one row as for two
        values = jnp.pad(values, ((0, 1), (0, 0)))
    axes = ((1,), (1,)), ((), ())
    sums = jax.lax.dot_general(values, matrix.values, axes, preferred_element_type=jnp.int32)
    return sums[: len(x)].astype(jnp.float32) * scale * matrix.scale[None]


def _quantize(x: Float[Array, "R I"]) -> tuple[Int8[Array, "R I"], Float[Array, "R 1"]]:
    """int8 values and a scale of each row, whose product is about `x`."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(1, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale
