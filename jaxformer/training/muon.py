"""Muon (Jordan 2024): momentum whose matrices are orthogonalised.

The iterations need a whole matrix. On a mesh each device has whole matrices for them, but only its
share of all matrices of one shape: the parts of momentum are exchanged for whole matrices, and the
parts of the results go back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxformer.training.parameters import ModelAxes, Params, axes_of, flatten, map_with_path

Coefficients = tuple[tuple[float, float, float], ...]
"""a, b, c of each iteration X -> a X + b (X X') X + c (X X')^2 X."""

CoefficientsName = Literal["standard", "dion", "polar_express"]

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.01  # room for rounding: they are made for singular values of up to 1

NS_COEFFS: Mapping[CoefficientsName, Coefficients] = {
    "standard": ((3.4445, -4.7750, 2.0315),) * 5,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": tuple(
        (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS
    ),
}
"""Five iterations each: Jordan 2024; Ahn et al. 2025, as in optax; Amsel et al. 2025.

The singular values of a result are between these numbers where a matrix has none below 1/300 of its
Frobenius norm; smaller ones become as much larger, and may stay below.

| standard | dion | polar_express |
|---|---|---|
| 0.68 to 1.21 | 0.97 to 1.15 | 0.87 to 1.13 |
"""

_EPS = 1e-8


class MuonState(NamedTuple):
    """The number of updates done, and the momentum."""

    count: Int[Array, ""]  # type: ignore[assignment]  # also a method of tuples, as in optax
    mu: Params


def scale_by_muon(
    momentum: float, axes: ModelAxes, ns_coeffs: CoefficientsName = "standard"
) -> optax.GradientTransformationExtraArgs:
    """Gradients become Nesterov momentum that is orthogonalised by `NS_COEFFS[ns_coeffs]`.

    `axes` come from `parameter_axes`; all parameters are matrices. The plain twin is
    `optax.contrib.scale_by_muon`, whose results are the same to rounding. `update` takes `specs`,
    the `PartitionSpec` of each path on the current mesh; without it no device shares its work. The
    "data" axis lies across `slices` groups of devices, between which nothing is exchanged: there
    the network is slow.
    """
    coefficients = NS_COEFFS[ns_coeffs]

    def init(params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(
        updates: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        specs: Mapping[str, PartitionSpec] | None = None,
        slices: int = 1,
        **_: Any,
    ) -> tuple[Params, MuonState]:
        assert isinstance(state, MuonState)
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        ahead = optax.tree.bias_correction(mu, momentum, optax.safe_increment(count))
        last = optax.tree.bias_correction(updates, momentum, count)
        nesterov = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, last)
        orthogonal = orthogonalize_tree(nesterov, axes, coefficients, specs, slices)
        return orthogonal, MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalize_tree(
    tree: Params,
    axes: ModelAxes,
    coefficients: Coefficients,
    specs: Mapping[str, PartitionSpec] | None = None,
    slices: int = 1,
) -> Params:
    """Each matrix of `tree` orthogonalised; see `scale_by_muon`."""
    leaves = flatten(tree)
    if specs and _mesh_sizes():
        results = _orthogonalize_shared(leaves, axes, coefficients, specs, slices)
    else:
        results = {}
        for path, leaf in leaves.items():
            parameter = axes_of(path, leaf, axes)
            stack = leaf.reshape(-1, *leaf.shape[parameter.num_stacked :])
            result = orthogonalize(stack, coefficients, len(parameter.inputs))
            results[path] = result.reshape(leaf.shape)
    return map_with_path(lambda path, _: results[path], tree)


def orthogonalize(
    matrices: Float[Array, "M ..."], coefficients: Coefficients, inputs: int = 1
) -> Float[Array, "M ..."]:
    """Matrices whose singular values become about 1, by the iterations of Newton and Schulz.

    Each has its inputs in the first `inputs` dimensions after M, and its outputs in the others.
    """
    rows = math.prod(matrices.shape[1 : 1 + inputs])
    x = matrices.reshape(len(matrices), rows, -1)
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:  # X X' is then the smaller product
        x = x.mT
    x /= jnp.sqrt(jnp.sum(jnp.square(x), (1, 2), keepdims=True)) + _EPS
    for a, b, c in coefficients:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    if is_tall:
        x = x.mT
    return x.reshape(matrices.shape)


class Exchange(NamedTuple):
    """A mesh axis and the dimension of [M, ...] that it divides; None: its devices are equal."""

    axis: str
    dimension: int | None
    slices: int = 1
    """The number of parts of the axis that exchange nothing with each other; 1 where a dimension is
    divided."""


class _Side(NamedTuple):
    """The inputs or the outputs of a matrix: the size of each dimension, and what divides it."""

    sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]

    @property
    def order(self) -> tuple[Any, ...]:
        """The key by which the smaller side of a matrix comes first."""
        return math.prod(self.sizes), self


class _Group(NamedTuple):
    """The form of matrices that are shared out together: its smaller side first."""

    rows: _Side
    columns: _Side
    stack_axes: tuple[str, ...]
    """The mesh axes that divide the stack: along these each device has matrices of its own."""


class _Member(NamedTuple):
    """A parameter of a group: `num_stacked` leading axes stack its matrices, perhaps with the
    outputs first."""

    path: str
    num_stacked: int
    is_transposed: bool


def _orthogonalize_shared(
    leaves: Mapping[str, jax.Array],
    axes: ModelAxes,
    coefficients: Coefficients,
    specs: Mapping[str, PartitionSpec],
    slices: int,
) -> dict[str, jax.Array]:
    """Each matrix orthogonalised, the work shared among the devices of the mesh."""
    groups: dict[_Group, list[_Member]] = {}
    for path, leaf in leaves.items():
        parameter = axes_of(path, leaf, axes)
        stacked = parameter.num_stacked
        first = stacked + len(parameter.inputs)
        entries = [*specs[path], *[None] * (leaf.ndim - len(specs[path]))]
        spec = tuple(_axis_names(entry) for entry in entries)
        stack_axes = tuple(name for names in spec[:stacked] for name in names)
        inputs = _Side(leaf.shape[stacked:first], spec[stacked:first])
        outputs = _Side(leaf.shape[first:], spec[first:])
        is_transposed = outputs.order < inputs.order
        sides = (outputs, inputs) if is_transposed else (inputs, outputs)
        members = groups.setdefault(_Group(*sides, stack_axes), [])
        members.append(_Member(path, stacked, is_transposed))
    results: dict[str, jax.Array] = {}
    for group, members in groups.items():
        paths = [member.path for member in members]
        spec = (*group.rows.spec, *group.columns.spec)
        exchanges = _exchanges(spec, group.stack_axes, slices)
        share = jax.shard_map(
            partial(_orthogonalize_parts, group, members, exchanges, coefficients),
            in_specs=tuple(specs[path] for path in paths),
            out_specs=[specs[path] for path in paths],
            check_vma=False,
        )
        parts = share(*(leaves[path] for path in paths))
        results |= zip(paths, parts, strict=True)
    return results


def _orthogonalize_parts(
    group: _Group,
    members: Sequence[_Member],
    exchanges: Sequence[Exchange],
    coefficients: Coefficients,
    *parts: jax.Array,
) -> list[jax.Array]:
    """The parts of orthogonalised matrices, from a device's `parts` of the members of a group."""
    stacks = []
    for member, part in zip(members, parts, strict=True):
        stack = part.reshape(-1, *part.shape[member.num_stacked :])
        stacks.append(
            _swap_sides(stack, len(group.columns.sizes)) if member.is_transposed else stack
        )
    orthogonalize_rows = partial(
        orthogonalize, coefficients=coefficients, inputs=len(group.rows.sizes)
    )
    result = compute_shared(orthogonalize_rows, jnp.concatenate(stacks), exchanges)
    results = []
    start = 0
    for member, part, stack in zip(members, parts, stacks, strict=True):
        matrix = result[start : start + len(stack)]
        start += len(stack)
        matrix = _swap_sides(matrix, len(group.rows.sizes)) if member.is_transposed else matrix
        results.append(matrix.reshape(part.shape))
    return results


def _swap_sides(matrices: jax.Array, count: int) -> jax.Array:
    """`matrices` [M, ...] with the first `count` dimensions after M moved to the end."""
    return jnp.moveaxis(matrices, range(1, 1 + count), range(matrices.ndim - count, matrices.ndim))


def compute_shared(
    compute: Callable[[jax.Array], jax.Array],
    matrices: Float[Array, "M ..."],
    exchanges: Sequence[Exchange],
) -> Float[Array, "M ..."]:
    """The parts of `compute(whole matrices)`, from a device's parts [M, ...] of all matrices.

    Each mesh axis of `exchanges` shares the matrices out among its devices.
    """
    if not exchanges:
        return compute(matrices)
    (axis, dimension, slices), *inner = exchanges
    if dimension is None:
        return _compute_among_equals(compute, matrices, axis, slices, inner)
    if len(matrices) == 1:  # to send it to one device and back would be twice the bytes
        whole = jax.lax.all_gather(matrices, axis, axis=dimension, tiled=True)
        result = compute_shared(compute, whole, inner)
        return _part(result, dimension, jax.lax.axis_index(axis), jax.lax.axis_size(axis))
    # Without the barrier XLA for a CPU sends slices of transposed arrays, whose layouts differ.
    padded = jax.lax.optimization_barrier(_pad(matrices, jax.lax.axis_size(axis)))
    share = jax.lax.all_to_all(padded, axis, 0, dimension, tiled=True)
    share = compute_shared(compute, share, inner)
    return jax.lax.all_to_all(share, axis, dimension, 0, tiled=True)[: len(matrices)]


def _compute_among_equals(
    compute: Callable[[jax.Array], jax.Array],
    matrices: jax.Array,
    axis: str,
    slices: int,
    inner: Sequence[Exchange],
) -> jax.Array:
    """`compute_shared` along an axis whose devices all have the same.

    Each of `slices` does all of it. In a slice as many devices share the work as shorten it; where
    they are fewer than all, several groups of them do the same.
    """
    count, devices = len(matrices), jax.lax.axis_size(axis)
    neighbours = devices // slices
    divisors = [size for size in range(1, neighbours + 1) if neighbours % size == 0]
    size = min(divisors, key=lambda size: (-(-count // size), size))
    if size == 1:
        return compute_shared(compute, matrices, inner)
    padded = _pad(matrices, size)
    share = _part(padded, 0, jax.lax.axis_index(axis) % size, size)
    result = compute_shared(compute, share, inner)
    groups = [list(range(first, first + size)) for first in range(0, devices, size)]
    gathered = jax.lax.all_gather(result, axis, axis=0, tiled=True, axis_index_groups=groups)
    return gathered[:count]


def _pad(matrices: jax.Array, size: int) -> jax.Array:
    """`matrices` and zeros, so that `size` divides their number."""
    return jnp.pad(matrices, [(0, -len(matrices) % size)] + [(0, 0)] * (matrices.ndim - 1))


def _part(x: jax.Array, dimension: int, index: jax.Array, count: int) -> jax.Array:
    """Part `index` of `count` equal parts of `x` along `dimension`."""
    size = x.shape[dimension] // count
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, dimension)


def _exchanges(
    spec: Sequence[tuple[str, ...]], stack_axes: tuple[str, ...], slices: int
) -> list[Exchange]:
    """The exchanges of matrices that `spec` divides, those between equal devices first.

    Devices along `stack_axes` have different matrices, and exchange nothing; nor do `slices`.
    """
    divided = []
    for dimension, names in enumerate(spec, 1):
        # The last axis divides the parts of those before it, so it is undone first.
        divided += [Exchange(name, dimension) for name in reversed(names)]
    taken = {exchange.axis for exchange in divided}.union(stack_axes)
    undivided = [
        Exchange(name, None, slices if name == "data" else 1)
        for name in _mesh_sizes()
        if name not in taken
    ]
    return undivided + divided


def _axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of several devices in an entry of a spec."""
    if entry is None:
        return ()
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name in _mesh_sizes())


def _mesh_sizes() -> dict[str, int]:
    """The axes of several devices of the current mesh; {} within a `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        return {}
    return {name: size for name, size in mesh.shape.items() if size > 1}
