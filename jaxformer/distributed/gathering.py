"""FSDP: all-gathers parameters for a loss, reduce-scatters their gradient.

All of it runs inside `jax.shard_map` over `BATCH_AXES`, where a device sees its own parts. A TPU's
compiler replaces a reduce-scatter by a sum of everything on all devices where the devices lie along
several axes of the torus (`tests/compilers` shows it for 4 to 256 chips), so the sums over fsdp go
in stages, each along one axis.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, PartitionSpec

from jaxformer.distributed.mesh import BATCH_AXES, MESH_AXES, row_spec
from jaxformer.errors import ConfigError
from jaxformer.ops.partitioning import partitioned
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params, flatten
from jaxformer.training.train_step import Batch, GradientSums, accumulate, loss_and_gradient

GatherAt = Literal["step", "use"]

Stages = tuple[tuple[tuple[int, ...], ...], ...]
"""For each stage of a sum over fsdp: the groups of indices along fsdp that are added up."""


class Gathering(NamedTuple):
    """The division of parameters over devices, and when and how they are gathered.

    `specs` is the tree of their `PartitionSpec`, `axes` are those of `BATCH_AXES` with more than
    one device; `Strategy.step` describes `at` and `dtype`; `stages` are those of `torus_stages`.
    """

    specs: Any
    axes: tuple[str, ...]
    at: GatherAt = "step"
    dtype: Any = None
    stages: Stages = ()

    def of_parts(self, loss: Loss) -> Loss:
        """`loss` as a function of the parts: it gets whole parameters, or boxes that gather them.

        Raises `ConfigError` with "use" for a loss that takes a part for the whole parameter.
        """

        def loss_of_parts(params: Params, *batch_and_rng: Any) -> Any:
            if self.at == "step":
                return loss(_as_stored(self._gather(params), params), *batch_and_rng)
            self._check_reads(loss, params, *batch_and_rng)
            return loss(self._boxes(params, GatheredAtUse), *batch_and_rng)

        return loss_of_parts

    def gradient_sums(
        self, loss: Loss, params: Params, batch: Batch, rng: jax.Array, parts: int
    ) -> GradientSums:
        """The sums of `loss` over the rows of all devices, and this device's part of the gradient.

        With "use", each of the `parts` of the batch adds a gradient up over the devices that divide
        the parameter. All other sums over devices are taken once, after the last part.
        """
        if self.at == "use":

            def sums_of(part: Batch) -> GradientSums:
                # Between barriers XLA moves no gather and no reduce-scatter out of the loop over
                # parts: what it gathers, and whole sums of gradients, would be kept in the loop.
                here, part = jax.lax.optimization_barrier((params, part))
                sums = loss_and_gradient(self.of_parts(loss), here, part, rng)
                return jax.lax.optimization_barrier(sums)

            grads, *sums = accumulate(sums_of, params, batch, parts)
        else:
            whole = self._gather(params)

            def sums_of(part: Batch) -> GradientSums:
                return loss_and_gradient(loss, _as_stored(whole, params), part, rng)

            like = jax.eval_shape(_as_stored, whole, params)
            grads, *sums = accumulate(sums_of, like, batch, parts)
            grads = jax.tree.map(partial(_scatter, stages=self.stages), grads, self.specs)
        return jax.tree.map(self._sum_over_copies, grads, self.specs), *self.sum(tuple(sums))

    def sum(self, tree: Any) -> Any:
        """`tree` added up over all devices that hold different rows."""
        return jax.lax.psum(tree, self.axes) if self.axes else tree

    def _gather(self, params: Params) -> Params:
        return jax.tree.map(partial(_gather, dtype=self.dtype), params, self.specs)

    def _boxes(self, params: Params, box: "type[GatheredAtUse]") -> Params:
        """`params` with each that is divided in a `box`."""

        def boxed(part: jax.Array, spec: PartitionSpec) -> Any:
            return box(part, spec, self.dtype, self.stages) if _is_gathered(spec) else part

        return jax.tree.map(boxed, params, self.specs)

    def _check_reads(self, loss: Loss, params: Params, batch: Batch, rng: jax.Array | None) -> None:
        """Raises `ConfigError` for a loss that depends on a part other than by gathering it.

        Such a loss takes the part for the whole parameter.
        """
        traced = jax.make_jaxpr(lambda params, *rest: loss(self._boxes(params, _Unread), *rest))(
            params, batch, rng
        )
        _, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        specs = jax.tree.leaves(self.specs)
        leaves = zip(flatten(params), specs, used[: len(specs)], strict=True)
        read = [path for path, spec, is_used in leaves if is_used and _divided(spec)]
        if read:
            raise ConfigError(
                f'gather_at="use", but the loss reads {", ".join(read)} without gathering: read '
                "parameters through Flax modules, call flax.linen.unbox(params) first, or give "
                'gather_at="step"'
            )

    def _sum_over_copies(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`gradient` added up over the devices that hold the same part of the parameter."""
        dividing = {axis for _, axes in _divided(spec) for axis in axes}
        others = tuple(axis for axis in self.axes if axis not in dividing)
        return jax.lax.psum(gradient, others) if others else gradient


class GatheredAtUse(struct.PyTreeNode, nn.meta.AxisMetadata[jax.Array]):
    """A part of a parameter in Flax's box for metadata: the module that reads it gathers it.

    The gather is part of what that module computes. So rematerialisation frees its result, and
    each layer of a scan gathers its own parameters.
    """

    part: jax.Array
    spec: PartitionSpec = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    stages: Stages = struct.field(pytree_node=False, default=())

    def unbox(self) -> jax.Array:
        """The whole parameter, rounded to `dtype`."""
        return _gather_at_use(self.part, self.spec, self.dtype, self.stages)

    def replace_boxed(self, val: Any) -> Any:
        """A box like this one with the part `val`."""
        return self.replace(part=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "GatheredAtUse":
        """A box like this one for parts that are stacked along axis `index`."""
        entries = [*self.spec, *[None] * (index - len(self.spec))]
        return self.replace(spec=PartitionSpec(*entries[:index], None, *entries[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "GatheredAtUse":
        """A box like this one for one of the parts that are stacked along axis `index`."""
        return self.replace(spec=PartitionSpec(*self.spec[:index], *self.spec[index + 1 :]))


class _Unread(GatheredAtUse):
    """Unboxes to zeros: what still depends on the part has read it without unboxing."""

    def unbox(self) -> jax.Array:
        """Zeros of the shape and type of the whole parameter."""
        whole = jax.eval_shape(super().unbox)
        return jnp.zeros(whole.shape, whole.dtype)


def on_shards(
    function: Callable[..., Any], mesh: Mesh, specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function(params, batch, ...)`, each device with its parts of the parameters and rows.

    XLA partitions what is computed along the other axes.
    """
    if not row_axes(mesh):
        return function
    has_others = mesh.size > mesh.shape["data"] * mesh.shape["fsdp"]

    def mapped(params: Params, batch: Batch, *rest: Any) -> Any:
        rows = jax.tree.map(row_spec, batch)
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(jax.tree.map(_batch_spec, specs), rows, *[PartitionSpec()] * len(rest)),
            out_specs=jax.tree.map(_batch_spec, out_specs),
            axis_names={*(BATCH_AXES if has_others else MESH_AXES)},
            check_vma=False,
        )(params, batch, *rest)

    return mapped


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that divide the rows of a batch among more than one group of devices."""
    return tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)


def check_gather_at(gather_at: str) -> None:
    """Raises `ConfigError` for a time to gather that is unknown."""
    if gather_at not in ("step", "use"):
        raise ConfigError(f"gather_at={gather_at!r} is unknown: give 'step' or 'use'")


def _batch_spec(spec: PartitionSpec) -> PartitionSpec:
    """`spec` with no other axes than `BATCH_AXES`."""
    return PartitionSpec(*_select_axes(spec, BATCH_AXES))


def _gather(part: jax.Array, spec: PartitionSpec, *, dtype: Any) -> jax.Array:
    """The parameter that `spec` divides, whole along all axes but "tensor"; moved in `dtype`."""
    if not _is_gathered(spec):
        return part
    whole = part if dtype is None else part.astype(dtype)
    for dimension, axes in _divided(spec):
        whole = jax.lax.all_gather(whole, axes, axis=dimension, tiled=True)
    return _constrain(whole, spec, ("tensor",))


def _scatter(gradient: jax.Array, spec: PartitionSpec, stages: Stages = ()) -> jax.Array:
    """This device's part of the sum of `gradient` over the devices that divide the parameter."""
    if not _is_gathered(spec):
        return gradient
    gradient = _constrain(gradient, spec, ("sequence", "tensor"))
    for dimension, axes in _divided(spec):
        gradient = sum_and_divide(gradient, dimension, axes, stages if axes == ("fsdp",) else ())
    return gradient


def _as_stored(whole: Params, params: Params) -> Params:
    """`whole` in the types of `params`, in which a gradient is added up.

    XLA removes the conversion where a parameter is used in the type in which it was gathered.
    """
    return jax.tree.map(lambda x, part: x.astype(part.dtype), whole, params)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_at_use(part: jax.Array, spec: PartitionSpec, dtype: Any, stages: Stages) -> jax.Array:
    return _gather_at_use_forward(part, spec, dtype, stages)[0]


def _gather_at_use_forward(part, spec, dtype, stages):
    return _as_stored(_gather(part, spec, dtype=dtype), part), None


def _gather_at_use_backward(spec, dtype, stages, _, gradient):
    return (_scatter(gradient, spec, stages),)


_gather_at_use.defvjp(_gather_at_use_forward, _gather_at_use_backward)


def _constrain(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """`x` divided as `spec` says along those of `axes`; XLA partitions along these."""
    if not partitioned():
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*_select_axes(spec, axes)))


def _divided(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions that `BATCH_AXES` divide, each with the axes that divide it."""
    dividing = enumerate(_select_axes(spec, BATCH_AXES))
    return [(dimension, axes) for dimension, axes in dividing if axes]


def _is_gathered(spec: PartitionSpec) -> bool:
    """Whether a parameter is gathered for the loss; along "tensor" it stays divided."""
    return any(_select_axes(spec, (*BATCH_AXES, "sequence")))


def _select_axes(spec: PartitionSpec, wanted: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Those of the `wanted` mesh axes that divide each dimension."""
    groups = (axes if isinstance(axes, tuple) else (axes,) for axes in spec)
    return [tuple(axis for axis in group if axis in wanted) for group in groups]


def torus_stages(mesh: Mesh) -> Stages:
    """The stages of a reduce-scatter over the fsdp axis of `mesh` on a TPU's torus.

    The first stage joins the most distant indices, the last one neighbours, so that index i ends
    with part i. () where the fsdp devices lie on one line, or are not those of a torus.
    """
    rows = np.moveaxis(mesh.devices, 1, -1).reshape(-1, mesh.shape["fsdp"])
    stages = {line_stages([tuple(getattr(x, "coords", ())) for x in row]) for row in rows}
    return stages.pop() if len(stages) == 1 else ()


def line_stages(coords: list[tuple[int, ...]]) -> Stages:
    """The stages of `torus_stages` for devices at `coords` of a torus, in the order of fsdp."""
    for axis in range(len(coords[0])):
        size = len({at[axis] for at in coords})
        if not 1 < size < len(coords) or len(coords) % size:
            continue
        others = [at[:axis] + at[axis + 1 :] for at in coords]
        lines = [range(first, first + size) for first in range(0, len(coords), size)]
        columns = [{coords[i][axis]: i for i in line} for line in lines]
        if any(len({others[i] for i in line}) > 1 for line in lines) or any(
            column.keys() != columns[0].keys() for column in columns
        ):
            continue
        outer = line_stages([others[line[0]] for line in lines])
        across = tuple(
            tuple(tuple(columns[i][at] for i in group) for group in groups for at in columns[0])
            for groups in outer or ((tuple(range(len(lines))),),)
        )
        return (*across, tuple(map(tuple, lines)))
    return ()


def sum_and_divide(
    gradient: jax.Array, dimension: int, axes: tuple[str, ...], stages: Stages
) -> jax.Array:
    """The sum of `gradient` over `axes`, of which each device keeps a part along `dimension`.

    A TPU's compiler also sums all of an array on all devices where a part is no whole number of
    tiles. So the parts come first, before two dimensions for the rest.
    """
    before, (size, *after) = gradient.shape[:dimension], gradient.shape[dimension:]
    counts = [len(groups[0]) for groups in stages] or [jax.lax.axis_size(axes)]
    part = size // math.prod(counts)
    parts = gradient.reshape(*before, *counts, part, *after)
    parts = jnp.moveaxis(parts, range(dimension, dimension + len(counts)), range(len(counts)))
    parts = parts.reshape(*counts, -1, parts.shape[-1])
    for groups in stages or (None,):
        parts = jax.lax.psum_scatter(parts, axes, axis_index_groups=groups)
    return parts.reshape(*before, part, *after)
