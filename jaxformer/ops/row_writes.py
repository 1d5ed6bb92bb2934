"""New keys and values in a cache, in place, each row's at a position of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxformer.ops.manual_axes import shape_like
from jaxformer.ops.rows_and_heads import map_rows_and_heads
from jaxformer.ops.tpu_tiles import LANES, has_positions_in_lanes, heads_at_once

_SUBLANES = 16
"""Positions of values that are read and written together: a tile of 16-bit numbers."""
_TILE_BYTES = 2**20
"""The most bytes of keys that a step of the kernel reads, of 16 MiB on the chip in all."""
_DTYPES = jnp.dtype("bfloat16"), jnp.dtype("float32")


def write_rows(
    key: Float[Array, "B *K H S"],
    value: Float[Array, "B *K S Hv"],
    new_key: Float[Array, "B *K H n"],
    new_value: Float[Array, "B *K n Hv"],
    start: Int[Array, " B"],
) -> tuple[Float[Array, "B *K H S"], Float[Array, "B *K S Hv"]]:
    """`key` and `value` with n new positions of each row from its `start` on.

    A start from which they do not fit is moved back, as `jax.lax.dynamic_update_slice` moves it.
    The plain twin is `write_plainly`: one kernel on a GPU, n positions a row on a CPU. A TPU's
    compiler turns it into a loop over the rows, which was three quarters of a step of Llama 3 8B
    with 32 texts; there a Pallas kernel reads and writes the tiles that hold these positions.

    >>> key, value = jnp.zeros((2, 3, 4)), jnp.zeros((2, 4, 3))
    >>> new = jnp.ones((2, 3, 1)), jnp.ones((2, 1, 3))
    >>> write_rows(key, value, *new, jnp.array([0, 2]))[0][:, 0]
    Array([[1., 0., 0., 0.],
           [0., 0., 1., 0.]], dtype=float32)
    """
    arrays = key, value, new_key, new_value, start
    if new_key.shape[-1] > LANES or not {key.dtype, value.dtype} <= {*_DTYPES}:
        return write_plainly(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=_write_tiles, default=write_plainly)


def write_plainly(
    key: Array, value: Array, new_key: Array, new_value: Array, start: Array
) -> tuple[Array, Array]:
    """`write_rows` by XLA."""
    update = jax.lax.dynamic_update_slice_in_dim
    write_key, write_value = (jax.vmap(partial(update, axis=axis)) for axis in (-1, -2))
    return write_key(key, new_key, start), write_value(value, new_value, start)


@jax.custom_jvp
def _write_tiles(
    key: Array, value: Array, new_key: Array, new_value: Array, start: Array
) -> tuple[Array, Array]:
    """`write_tiles`, also of arrays without an axis K, on each device of the current mesh."""
    arrays = [x if x.ndim == 4 else x[:, None] for x in (key, value, new_key, new_value)]
    written = map_rows_and_heads(write_tiles, (*arrays, start))
    return written[0].reshape(key.shape), written[1].reshape(value.shape)


@_write_tiles.defjvp
def _write_tiles_jvp(primals: Any, tangents: Any) -> Any:
    key, value, new_key, new_value, _ = tangents
    return _write_tiles(*primals), write_plainly(key, value, new_key, new_value, primals[-1])


@partial(jax.jit, static_argnames="interpret")  # traced once for all layers
def write_tiles(
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S Hv"],
    new_key: Float[Array, "B K H n"],
    new_value: Float[Array, "B K n Hv"],
    start: Int[Array, " B"],
    interpret: bool = False,
) -> tuple[Float[Array, "B K H S"], Float[Array, "B K S Hv"]]:
    """`write_rows` by a Pallas kernel, a row after the other, while the next one is read.

    Positions of values lie in the lanes, as positions of keys do, where heads do not fill the
    lanes. A TPU keeps values so, and would otherwise fill the memory of a cache up to whole lanes.
    """
    (batch, heads, size, length), count = key.shape, new_key.shape[3]
    start = jnp.clip(start, 0, length - count).astype(jnp.int32)
    # The new columns of all rows lie side by side: a row's columns are in one tile.
    columns = pl.next_power_of_2(count)
    new_key = _side_by_side(new_key, 3, columns, LANES)
    value_size = value.shape[3]
    is_in_lanes = has_positions_in_lanes(value_size)
    if is_in_lanes:
        value_axis, value_positions = 1, LANES
        value_tile = (value_size, LANES)
        value, new_value = jnp.swapaxes(value, 2, 3), jnp.swapaxes(new_value, 2, 3)
    else:
        value_axis, value_positions = 0, max(_SUBLANES, columns)
        value_tile = (value_positions, value_size)
    new_value = _side_by_side(new_value, 2 + value_axis, columns, value_positions)
    at_once = heads_at_once(heads, max(size, value_size) * key.dtype.itemsize, _TILE_BYTES)

    def tile_of_cache(positions: int) -> Callable[..., Array]:
        """The tile of so many `positions` that holds the first or the last new one."""

        def index(row: Array, step: Array, start: Any) -> Array:
            last = start[row] + jnp.int32(count - 1)
            return jax.lax.div(jax.lax.select(step == 0, start[row], last), jnp.int32(positions))

        return index

    def tile_of_new(positions: int) -> Callable[..., Array]:
        return lambda row, step, start: jax.lax.div(row, jnp.int32(positions // columns))

    def spec_of_cache(shape: tuple[int, int], axis: int) -> pl.BlockSpec:
        index = tile_of_cache(shape[axis])

        def indices(row: Array, group: Array, step: Array, start: Any) -> tuple[Array, ...]:
            places = [jnp.int32(0)] * 2
            places[axis] = index(row, step, start)
            return row, group, *places

        return pl.BlockSpec((1, at_once, *shape), indices)

    def spec_of_new(shape: tuple[int, int], axis: int) -> pl.BlockSpec:
        index = tile_of_new(shape[axis])

        def indices(row: Array, group: Array, step: Array, start: Any) -> tuple[Array, ...]:
            places = [jnp.int32(0)] * 2
            places[axis] = index(row, step, start)
            return group, *places

        return pl.BlockSpec((at_once, *shape), indices)

    key_tile = (size, LANES)
    of_cache = [spec_of_cache(key_tile, 1), spec_of_cache(value_tile, value_axis)]
    tiles = tile_of_cache(LANES), tile_of_cache(value_positions)
    written = pl.pallas_call(
        partial(_kernel, count, columns, value_axis, *tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # Positions that begin anywhere lie in two tiles.
            grid=(batch, heads // at_once, 1 if count == 1 else 2),
            in_specs=[spec_of_new(key_tile, 1), spec_of_new(value_tile, value_axis), *of_cache],
            out_specs=of_cache,
        ),
        out_shape=[shape_like(x, x.shape, x.dtype) for x in (key, value)],
        input_output_aliases={3: 0, 4: 1},
        interpret=interpret,
        name="write_rows",
    )(start, new_key, new_value, key, value)
    key, value = written
    return key, jnp.swapaxes(value, 2, 3) if is_in_lanes else value


def _side_by_side(new: Array, axis: int, columns: int, multiple: int) -> Array:
    """`new` [B, K, ...] as [K, ...] with the positions of all rows in `axis`, `columns` for each.

    Zeros fill it up to a multiple of `multiple`.
    """
    widths = [(0, 0)] * new.ndim
    widths[axis] = (0, columns - new.shape[axis])
    new = jnp.moveaxis(jnp.pad(new, widths), 0, axis - 1)
    new = new.reshape(*new.shape[: axis - 1], -1, *new.shape[axis + 1 :])
    widths = [(0, 0)] * new.ndim
    widths[axis - 1] = (0, -new.shape[axis - 1] % multiple)
    return jnp.pad(new, widths)


def _kernel(
    count: int,
    columns: int,
    value_axis: int,
    key_tile: Any,
    value_tile: Any,
    start_ref: Any,
    new_key_ref: Any,
    new_value_ref: Any,
    key_ref: Any,
    value_ref: Any,
    key_out_ref: Any,
    value_out_ref: Any,
) -> None:
    """The tiles of a row with its new positions; a tile that comes twice is made twice alike.

    Positions are axis 1 of a tile of keys, and `value_axis` of one of values.
    """
    row, step = pl.program_id(0), pl.program_id(2)
    start = start_ref[row]

    def replaced(old: Array, new: Array, axis: int, tile: Any) -> Array:
        """The tile `old` with the new positions that lie in it."""
        size, dtype = old.shape[axis], old.dtype
        first = jax.lax.rem(row * jnp.int32(columns), jnp.int32(size))
        shift = jax.lax.rem(start + jnp.int32(size) - first, jnp.int32(size))
        # Registers of 32 bits are rotated.
        new, old = new.astype(jnp.float32), old.astype(jnp.float32)
        rotated = pltpu.roll(new, shift, axis)
        place = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis)
        place += tile(row, step, start_ref) * jnp.int32(size)
        is_new = (place >= start) & (place < start + count)
        return jnp.where(is_new, rotated, old).astype(dtype)

    def write_head(head: Any, carry: None) -> None:
        key_out_ref[0, head] = replaced(key_ref[0, head], new_key_ref[head], 1, key_tile)
        new_value = new_value_ref[head]
        value_out_ref[0, head] = replaced(value_ref[0, head], new_value, value_axis, value_tile)

    jax.lax.fori_loop(0, key_ref.shape[1], write_head, None)
