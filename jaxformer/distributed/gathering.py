"""FSDP: all-gathers parameters for a loss, reduce-scatters their gradient.

All of it runs inside `jax.shard_map` over `BATCH_AXES`, where a device sees its own parts. The
collectives run in a second one over "sequence" and "tensor", which XLA partitions elsewhere: it
would gather along these what a collective over other axes touches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, PartitionSpec

from jaxformer.distributed.batch_rows import row_spec
from jaxformer.distributed.mesh import BATCH_AXES, MESH_AXES
from jaxformer.distributed.torus import Stages, sum_and_divide
from jaxformer.errors import ConfigError
from jaxformer.ops.partitioning import partitioned
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params, flatten
from jaxformer.training.train_step import Batch, GradientSums, accumulate, loss_and_gradient

GatherAt = Literal["step", "use"]

_PARTITIONED_AXES = ("sequence", "tensor")
"""The mesh axes that divide parameters and that XLA partitions a step along."""


class Gathering(NamedTuple):
    """The division of parameters over devices, and when and how they are gathered.

    `specs` is the tree of their `PartitionSpec`, `axes` are the `BATCH_AXES` with more than
    one device; `Strategy.step` describes `at` and `dtype`; `stages` come from `torus_stages`.
    `kept` is the tree of `loss_specs`; None keeps what `specs` divides along "tensor".
    """

    specs: Any
    axes: tuple[str, ...]
    at: GatherAt = "step"
    dtype: Any = None
    stages: Stages = ()
    kept: Any = None

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
            sums = self._sums_gathered_at_use(loss, params, batch, rng, parts)
        else:
            sums = self._sums_gathered_once(loss, params, batch, rng, parts)
        grads, total, tokens, auxiliary = sums
        grads = jax.tree.map(self._sum_over_copies, grads, self.specs)
        total, tokens, auxiliary = self.sum((total, tokens, auxiliary))
        return grads, total, tokens, auxiliary

    def _sums_gathered_at_use(
        self, loss: Loss, params: Params, batch: Batch, rng: jax.Array, parts: int
    ) -> GradientSums:
        """The sums over this device's rows; the modules gather, and scatter the gradient."""

        def sums_of(part: Batch) -> GradientSums:
            # Between barriers XLA moves no gather and no reduce-scatter out of the loop over
            # parts: what it gathers, and whole sums of gradients, would be kept in the loop.
            stored, part = jax.lax.optimization_barrier((params, part))
            sums = loss_and_gradient(self.of_parts(loss), stored, part, rng)
            return jax.lax.optimization_barrier(sums)

        return accumulate(sums_of, params, batch, parts)

    def _sums_gathered_once(
        self, loss: Loss, params: Params, batch: Batch, rng: jax.Array, parts: int
    ) -> GradientSums:
        """The sums over this device's rows; parameters are gathered before, gradients scattered."""
        whole = self._gather(params)

        def sums_of(part: Batch) -> GradientSums:
            stored = _as_stored(whole, params)
            grads, total, tokens, auxiliary = loss_and_gradient(loss, stored, part, rng)
            # Sums of parts are kept divided, and what is added up moves as parts.
            grads = jax.tree.map(_divide_gradient, grads, self.specs, self._kept())
            return grads, total, tokens, auxiliary

        like = jax.eval_shape(_as_stored, whole, params)
        grads, total, tokens, auxiliary = accumulate(sums_of, like, batch, parts)
        scatter = partial(_scatter, stages=self.stages)
        grads = jax.tree.map(scatter, grads, self.specs, self._kept())
        return grads, total, tokens, auxiliary

    def sum(self, tree: Any) -> Any:
        """`tree` added up over all devices that hold different rows."""
        return jax.lax.psum(tree, self.axes) if self.axes else tree

    def _gather(self, params: Params) -> Params:
        gather = partial(_gather, dtype=self.dtype)
        return jax.tree.map(gather, params, self.specs, self._kept())

    def _kept(self) -> Any:
        if self.kept is not None:
            return self.kept
        return jax.tree.map(
            lambda spec: PartitionSpec(*_select_axes(spec, ("tensor",))), self.specs
        )

    def _boxes(self, params: Params, box: "type[GatheredAtUse]") -> Params:
        """`params` with each that is divided in a `box`."""

        def boxed(part: jax.Array, spec: PartitionSpec, kept: PartitionSpec) -> Any:
            is_gathered = _is_gathered(spec, kept)
            return box(part, spec, kept, self.dtype, self.stages) if is_gathered else part

        return jax.tree.map(boxed, params, self.specs, self._kept())

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
        summed_axes = tuple(axis for axis in self.axes if axis not in dividing)
        return jax.lax.psum(gradient, summed_axes) if summed_axes else gradient


class GatheredAtUse(struct.PyTreeNode, nn.meta.AxisMetadata[jax.Array]):
    """A part of a parameter in Flax's box for metadata: the module that reads it gathers it.

    The gather is part of what that module computes. So rematerialisation frees its result, and
    each layer of a scan gathers its own parameters.
    """

    part: jax.Array
    spec: PartitionSpec = struct.field(pytree_node=False)
    kept: PartitionSpec = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    stages: Stages = struct.field(pytree_node=False, default=())

    def unbox(self) -> jax.Array:
        """The whole parameter, rounded to `dtype`."""
        return _gather_at_use(self.part, self.spec, self.kept, self.dtype, self.stages)

    def replace_boxed(self, val: Any) -> Any:
        """A box like this one with the part `val`."""
        return self.replace(part=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "GatheredAtUse":
        """A box like this one for parts that are stacked along axis `index`."""
        return self.replace(spec=_with_axis(self.spec, index), kept=_with_axis(self.kept, index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "GatheredAtUse":
        """A box like this one for one of the parts that are stacked along axis `index`."""
        spec, kept = _without_axis(self.spec, index), _without_axis(self.kept, index)
        return self.replace(spec=spec, kept=kept)


def _with_axis(spec: PartitionSpec, index: int) -> PartitionSpec:
    """`spec` with a further dimension `index` that nothing divides."""
    entries = [*spec, *[None] * (index - len(spec))]
    return PartitionSpec(*entries[:index], None, *entries[index:])


def _without_axis(spec: PartitionSpec, index: int) -> PartitionSpec:
    return PartitionSpec(*spec[:index], *spec[index + 1 :])


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


def _gather(part: jax.Array, spec: PartitionSpec, kept: PartitionSpec, *, dtype: Any) -> jax.Array:
    """The parameter that `spec` divides, whole but for what is `kept`; moved in `dtype`."""
    if not _is_gathered(spec, kept):
        return part

    def gather_rows(part: jax.Array) -> jax.Array:
        for dimension, axes in _divided(spec):
            part = jax.lax.all_gather(part, axes, axis=dimension, tiled=True)
        return part

    part = part if dtype is None else part.astype(dtype)
    return _constrain(_on_own_part(gather_rows, spec)(part), kept, ("tensor",))


def _scatter(
    gradient: jax.Array, spec: PartitionSpec, kept: PartitionSpec, stages: Stages = ()
) -> jax.Array:
    """This device's part of the sum of `gradient` over the devices that divide the parameter."""
    if not _is_gathered(spec, kept):
        return gradient

    def scatter_rows(gradient: jax.Array) -> jax.Array:
        for dimension, axes in _divided(spec):
            stages_of_axes = stages if axes == ("fsdp",) else ()
            gradient = sum_and_divide(gradient, dimension, axes, stages_of_axes)
        return gradient

    gradient = _constrain(gradient, spec, _PARTITIONED_AXES)
    return _on_own_part(scatter_rows, spec)(gradient)


def _divide_gradient(gradient: jax.Array, spec: PartitionSpec, kept: PartitionSpec) -> jax.Array:
    """`gradient` divided along "sequence" and "tensor" as the parameter is."""
    if _select_axes(spec, ("tensor",)) != _select_axes(kept, ("tensor",)):
        # Otherwise XLA gathers the gradient of logits, to compute a part of it on each device.
        gradient = _constrain(gradient, kept, ("tensor",))
    return _constrain(gradient, spec, _PARTITIONED_AXES)


def _on_own_part(
    collective: Callable[[jax.Array], jax.Array], spec: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """`collective`, over `BATCH_AXES`, of a device's own part along "sequence" and "tensor".

    `spec` divides the array along these. Where it divides one dimension along axes of either kind,
    the parts that `collective` joins are not neighbours: XLA then gathers the dimension before.
    """
    along_batch = _select_axes(spec, BATCH_AXES)
    along_others = _select_axes(spec, _PARTITIONED_AXES)
    is_shared = any(map(all, zip(along_batch, along_others, strict=True)))
    if is_shared or not any(along_batch) or not partitioned():
        return collective
    own_part = PartitionSpec(*along_others)
    return jax.shard_map(
        collective,
        in_specs=own_part,
        out_specs=own_part,
        axis_names=set(partitioned()),
        check_vma=False,
    )


def _as_stored(whole: Params, params: Params) -> Params:
    """`whole` in the types of `params`, in which a gradient is added up.

    XLA removes the conversion where a parameter is used in the type in which it was gathered.
    """
    return jax.tree.map(lambda x, part: x.astype(part.dtype), whole, params)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather_at_use(
    part: jax.Array, spec: PartitionSpec, kept: PartitionSpec, dtype: Any, stages: Stages
) -> jax.Array:
    return _gather_at_use_forward(part, spec, kept, dtype, stages)[0]


def _gather_at_use_forward(part, spec, kept, dtype, stages):
    return _as_stored(_gather(part, spec, kept, dtype=dtype), part), None


def _gather_at_use_backward(spec, kept, dtype, stages, _, gradient):
    divided = _divide_gradient(gradient, spec, kept)
    return (_scatter(divided, spec, kept, stages),)


_gather_at_use.defvjp(_gather_at_use_forward, _gather_at_use_backward)


def _constrain(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """`x` divided as `spec` says along `axes` only; XLA partitions along these."""
    if not partitioned():
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*_select_axes(spec, axes)))


def _divided(spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions that `BATCH_AXES` divide, each with the axes that divide it."""
    dividing = enumerate(_select_axes(spec, BATCH_AXES))
    return [(dimension, axes) for dimension, axes in dividing if axes]


def _is_gathered(spec: PartitionSpec, kept: PartitionSpec) -> bool:
    """Whether a parameter is gathered for the loss along an axis that divides it."""
    divided = _select_axes(spec, ("tensor",)) != _select_axes(kept, ("tensor",))
    return divided or any(_select_axes(spec, (*BATCH_AXES, "sequence")))


def _select_axes(spec: PartitionSpec, wanted: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The `wanted` mesh axes among the ones that divide each dimension."""
    groups = (axes if isinstance(axes, tuple) else (axes,) for axes in spec)
    return [tuple(axis for axis in group if axis in wanted) for group in groups]
