"""Products of rows that are sorted by group with the matrices of their groups."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jaxformer import optional_dependencies
from jaxformer.ops.dense import summed_in_float32
from jaxformer.ops.manual_axes import varying_axes
from jaxformer.ops.tpu_tiles import LANES

_MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
"""JAX's kernels `gmm` and `tgmm`, imported when a call needs them: a later JAX may lack them."""
_SUBLANES = 16
"""Rows of the smallest tile of 16-bit numbers."""
_TILES_OF_GROUP = 4
"""Tiles of rows of a group of average size: a tile that two groups share is computed twice."""
_ROW_BYTES = 1024
"""The most bytes of a column of a tile of rows."""
_INPUTS = 1024
"""The most inputs of a tile of a matrix."""
_MATRIX_BYTES = 2**21
"""The most bytes of a tile of a matrix; a chip has 16 MiB for all tiles, each of them twice."""
_DTYPES = jnp.dtype("bfloat16"), jnp.dtype("float32")


def grouped_product(
    rows: Float[Array, "N I"], matrices: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "N O"]:
    """Each of `rows` times the matrix of its group; the first `sizes[0]` rows are of group 0.

    Rows after the last group are undefined. The plain twin is `jax.lax.ragged_dot`. A TPU's
    compiler turns it into products of all rows with all matrices, and masks them; there JAX's
    kernels of MegaBlocks (Gale et al. 2022) compute the tiles of rows that a group has.

    >>> matrices = jnp.stack([jnp.eye(2), 5.0 * jnp.eye(2)])
    >>> grouped_product(jnp.ones((3, 2)), matrices, jnp.array([1, 2]))
    Array([[1., 1.],
           [5., 5.],
           [5., 5.]], dtype=float32)
    """
    if not _has_kernel(rows, matrices):
        return _by_xla(rows, matrices, sizes)
    kernel = partial(multiply_by_kernel, False)
    return jax.lax.platform_dependent(rows, matrices, sizes, tpu=kernel, default=_by_xla)


def _by_xla(rows: Array, matrices: Array, sizes: Array) -> Array:
    multiply = partial(jax.lax.ragged_dot, group_sizes=sizes)
    return summed_in_float32(multiply, rows, matrices).astype(rows.dtype)


def _has_kernel(rows: Array, matrices: Array) -> bool:
    """Whether this JAX has the kernels, and they compute these arrays.

    They have no types of axes along which arrays vary, and no indices of 64 bits.
    """
    if rows.dtype != matrices.dtype or rows.dtype not in _DTYPES:
        return False
    if varying_axes((rows, matrices)) or jnp.result_type(int) == jnp.int64:
        return False
    return optional_dependencies.is_there(_MEGABLOX)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_by_kernel(
    interpret: bool,
    rows: Float[Array, "N I"],
    matrices: Float[Array, "E I O"],
    sizes: Int[Array, " E"],
) -> Float[Array, "N O"]:
    """`grouped_product` by a Pallas kernel; rows after the last group are zeros."""
    return _multiply(interpret, rows, matrices, sizes, False)


def _multiply(
    interpret: bool, rows: Array, matrices: Array, sizes: Array, is_transposed: bool
) -> Array:
    """Rows times the matrices of their groups, or times these matrices transposed."""
    inputs, outputs = matrices.shape[1:]
    if is_transposed:
        inputs, outputs = outputs, inputs
    tile = _tile_of_rows(rows, len(matrices))
    padded = _pad_rows(rows, tile)
    with _precision(rows):
        out = import_module(_MEGABLOX).gmm(
            padded,
            matrices,
            _with_last_group(sizes, len(padded)),
            rows.dtype,
            (tile, *_tile_of_matrix(inputs, outputs, rows.dtype.itemsize)),
            transpose_rhs=is_transposed,
            interpret=interpret,
        )
    return out[: len(rows)]


def _multiply_forward(
    interpret: bool, rows: Array, matrices: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return multiply_by_kernel(interpret, rows, matrices, sizes), (rows, matrices, sizes)


def _multiply_backward(
    interpret: bool, saved: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array, None]:
    rows, matrices, sizes = saved
    inputs, outputs = matrices.shape[1:]
    tile = _tile_of_rows(rows, len(matrices))
    padded = _pad_rows(rows, tile)
    with _precision(rows):
        d_matrices = import_module(_MEGABLOX).tgmm(
            padded.T,
            _pad_rows(d_out, tile),
            _with_last_group(sizes, len(padded)),
            matrices.dtype,
            # A tile is added up in float32.
            (tile, *_tile_of_matrix(inputs, outputs, jnp.dtype("float32").itemsize)),
            num_actual_groups=len(matrices),
            interpret=interpret,
        )
    return _multiply(interpret, d_out, matrices, sizes, True), d_matrices, None


multiply_by_kernel.defvjp(_multiply_forward, _multiply_backward)


def _precision(rows: Array) -> AbstractContextManager[None]:
    """Sets the precision of products in the kernels; 16-bit numbers have only one."""
    return jax.default_matmul_precision("default") if rows.dtype.itemsize == 2 else nullcontext()


def _with_last_group(sizes: Array, length: int) -> Array:
    """`sizes`, and the number of rows that are in no group."""
    sizes = sizes.astype(jnp.int32)
    return jnp.append(sizes, jnp.int32(length) - sizes.sum(dtype=jnp.int32))


def _pad_rows(rows: Array, multiple: int) -> Array:
    return jnp.pad(rows, ((0, -len(rows) % multiple), (0, 0)))


def _tile_of_rows(rows: Array, groups: int) -> int:
    """The number of rows of a tile, a power of two."""
    most = _ROW_BYTES // rows.dtype.itemsize
    wanted = min(most, max(_SUBLANES, len(rows) // (groups * _TILES_OF_GROUP)))
    return 2 ** (wanted.bit_length() - 1)


def _tile_of_matrix(inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """The inputs and outputs of a tile of a matrix."""
    tile_inputs = min(inputs, _INPUTS)
    most = _MATRIX_BYTES // (itemsize * tile_inputs)
    return tile_inputs, min(outputs, most // LANES * LANES)
