"""The mesh axes that divide each parameter, by the meaning of its axes."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from jaxformer.errors import ConfigError
from jaxformer.nn.axes import EXPERTS, Axes
from jaxformer.training.parameters import ModelAxes, Params, axes_of, flatten

MeshAxes = str | tuple[str, ...] | None

RULES: Mapping[str, MeshAxes] = {
    "experts": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "bucket": None,
}
"""The mesh axis that divides each axis of a parameter, by the names of `parameter_axes`.

Heads, and columns and rows of the feed-forward network, as in Shoeybi et al. 2019, section 3. Whole
experts where the mesh axis divides their number, else columns and rows of each. Of the axes of a
matrix that are then still whole, the fsdp axis divides the largest that it can (Rajbhandari et al.
2020, ZeRO), unless one of its names has the rule None; then the sequence axis divides one. A
vocabulary that its mesh axis does not divide is whole: that axis divides another of the table, if
one is left. A step gathers the parameters to compute its gradient, but for what is divided by name
along "tensor".
Biases and scales are divided only by name.
"""

_MAY_BE_WHOLE = ("kv_heads", "vocab", EXPERTS)
"""Axes that are not divided where the mesh axis does not divide their size; that costs memory."""
_VOCABULARY = "vocab"
"""Where it is whole, its mesh axis divides another axis of the table, as fsdp does."""


def partition_specs(
    params: Params,
    sizes: Mapping[str, int],
    rules: Mapping[str, MeshAxes] = RULES,
    *,
    paths: Mapping[str, PartitionSpec] | None = None,
    axes: ModelAxes | None = None,
) -> dict[str, PartitionSpec]:
    """{"path/of/leaf": its `PartitionSpec`} on a mesh with axes of `sizes`.

    `axes` come from `parameter_axes`; without them a parameter with two dimensions is a matrix
    with unnamed axes. The first regular expression of `paths` that matches a parameter's path
    decides alone; stacked layers do not count in its spec. Layers are not divided. Raises
    `ConfigError`, with the parameter and the numbers, where a rule does not fit.

    >>> params = {"up": {"kernel": np.ones((6, 8))}, "norm": {"scale": np.ones(8)}}
    >>> axes = {"up/kernel": Axes(("embed",), ("mlp",))}
    >>> specs = partition_specs(params, {"data": 1, "fsdp": 3, "tensor": 2}, axes=axes)
    >>> tuple(specs["up/kernel"]), tuple(specs["norm/scale"])  # 3 x 2 parts of 2 x 4
    (('fsdp', 'tensor'), ())
    """

    def spec_of(path: str, leaf: Any) -> PartitionSpec:
        spec = next((spec for name, spec in (paths or {}).items() if re.search(name, path)), None)
        if spec is None:
            parameter = axes_of(path, leaf, axes)
            layers = parameter.layers
            entries = _by_name(path, leaf.shape[layers:], parameter, rules, sizes)
        else:
            layers = axes[path].layers if axes and path in axes else 0
            if len(spec) > leaf.ndim - layers:
                raise ConfigError(
                    f"{path} has the shape {list(leaf.shape[layers:])}, but its spec {spec} has "
                    f"{len(spec)} dimensions: give at most {leaf.ndim - layers}"
                )
            entries = _divide(path, leaf.shape[layers:], spec, sizes)
        while entries and entries[-1] is None:  # XLA's form: any other form would compile again
            entries.pop()
        return PartitionSpec(*[None] * layers, *entries) if entries else PartitionSpec()

    return {path: spec_of(path, leaf) for path, leaf in flatten(params).items()}


def inherited_specs(
    tree: Any, params: Params, specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """{"path/of/leaf" of `tree`: the spec of the parameter that the leaf belongs to}.

    A leaf belongs to a parameter if its path ends in the parameter's path and the shapes are equal,
    as for moments and moving averages. Every other leaf is replicated.
    """
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    inherited = {}
    for path, leaf in flatten(tree).items():
        parts = path.split("/")
        owners = ("/".join(parts[start:]) for start in range(len(parts)))
        matching = (specs[owner] for owner in owners if shapes.get(owner) == leaf.shape)
        inherited[path] = next(matching, PartitionSpec())
    return inherited


def loss_specs(
    params: Params,
    specs: Mapping[str, PartitionSpec],
    rules: Mapping[str, MeshAxes] = RULES,
    *,
    paths: Mapping[str, PartitionSpec] | None = None,
    axes: ModelAxes | None = None,
) -> dict[str, PartitionSpec]:
    """{"path/of/leaf": the `PartitionSpec` of the parameter within a loss}, from its `specs`.

    It stays divided along "tensor", where that divides its heads, features or vocabulary by `rules`
    or by `paths`, and is whole along all other axes. Without `axes`, as for arrays whose model is
    not known, it stays divided along "tensor" as its spec says.
    """
    if axes is None:
        return {path: _along_tensor(spec) for path, spec in specs.items()}
    kept = {}
    for path, leaf in flatten(params).items():
        parameter = axes_of(path, leaf, axes)
        is_by_path = any(re.search(name, path) for name in paths or {})
        names = [""] * parameter.layers + [*parameter.names]
        entries: list[MeshAxes] = []
        for entry, name in zip(specs[path], names, strict=False):
            is_by_rule = "tensor" in mesh_axes((rules.get(name),))
            stays = "tensor" in mesh_axes((entry,)) and (is_by_path or is_by_rule)
            entries.append("tensor" if stays else None)
        kept[path] = PartitionSpec(*entries)
    return kept


def _along_tensor(spec: PartitionSpec) -> PartitionSpec:
    """`spec` with nothing but what is divided along "tensor"."""
    return PartitionSpec(*("tensor" if "tensor" in mesh_axes((x,)) else None for x in spec))


def mesh_axes(spec: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes in a spec, whose entries are names, tuples of names, or None."""
    groups = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return tuple(name for group in groups for name in group if name is not None)


def _by_name(
    path: str,
    shape: tuple[int, ...],
    parameter: Axes,
    rules: Mapping[str, MeshAxes],
    sizes: Mapping[str, int],
) -> list[MeshAxes]:
    """The mesh axes of each dimension, by the names of the parameter's axes."""
    names = parameter.names
    entries = _divide(path, shape, [rules.get(name) for name in names], sizes, names)
    of_matrix = (*parameter.inputs, *parameter.outputs)
    if not parameter.inputs or any(rules.get(name, "") is None for name in of_matrix):
        return entries
    first = len(parameter.stacks)
    every_dimension = range(first, len(shape))
    if "fsdp" not in mesh_axes(entries):
        _divide_largest(entries, shape, "fsdp", sizes, every_dimension)
    if "sequence" not in mesh_axes(entries):
        # Gradients are added up along "sequence" as matrices of all inputs times all outputs. A
        # reduce-scatter leaves parts of a side's first dimension: these lie together in the matrix.
        first_dimensions = sorted({first, first + len(parameter.inputs)} & {*every_dimension})
        is_divided = _divide_largest(entries, shape, "sequence", sizes, first_dimensions)
        if not is_divided:
            is_divided = _divide_further(entries, shape, "sequence", sizes, first_dimensions)
        if not is_divided:
            _divide_largest(entries, shape, "sequence", sizes, every_dimension)
    if _VOCABULARY in names and entries[names.index(_VOCABULARY)] is None:
        for axis in mesh_axes((rules.get(_VOCABULARY),)):
            _divide_largest(entries, shape, axis, sizes, every_dimension)
    return entries


def _divide_largest(
    entries: list[MeshAxes],
    shape: tuple[int, ...],
    axis: str,
    sizes: Mapping[str, int],
    dimensions: Iterable[int],
) -> bool:
    """Divides the largest of `dimensions` that is whole by `axis`; False where there is none."""
    parts = sizes.get(axis, 1)
    free = [i for i in dimensions if entries[i] is None and shape[i] % parts == 0]
    if not free or parts == 1:
        return False
    entries[max(free, key=lambda i: shape[i])] = axis
    return True


def _divide_further(
    entries: list[MeshAxes],
    shape: tuple[int, ...],
    axis: str,
    sizes: Mapping[str, int],
    dimensions: Iterable[int],
) -> bool:
    """Divides one of `dimensions` along "tensor" and `axis`; False where neither allows it."""
    parts = sizes.get(axis, 1)
    for i in dimensions:
        if parts > 1 and entries[i] == "tensor" and shape[i] % (sizes["tensor"] * parts) == 0:
            entries[i] = ("tensor", axis)
            return True
    return False


def _divide(
    path: str,
    shape: tuple[int, ...],
    wanted: Iterable[MeshAxes],
    sizes: Mapping[str, int],
    names: tuple[str, ...] = (),
) -> list[MeshAxes]:
    """The `wanted` mesh axes, or None where they do not divide a dimension into several parts."""
    entries: list[MeshAxes] = []
    for dimension, axis in enumerate(wanted):
        mesh_names, size = mesh_axes((axis,)), shape[dimension]
        unknown = [name for name in mesh_names if name not in sizes]
        if unknown:
            raise ConfigError(
                f"a rule for {path} names the mesh axis {unknown[0]!r}: give one of "
                f"{', '.join(sizes)}"
            )
        if EXPERTS in names[:dimension] and {*mesh_names} & {*mesh_axes(entries)}:
            entries.append(None)  # the mesh axis divides whole experts
            continue
        parts = math.prod(sizes[name] for name in mesh_names)
        may_be_whole = bool(names) and names[dimension] in _MAY_BE_WHOLE
        if size % parts and not may_be_whole:
            remedy = f"RULES | {{{names[dimension]!r}: None}}" if names else "another spec"
            raise ConfigError(
                f"dimension {dimension} of {path} {list(shape)} has size {size}, which "
                f"{'*'.join(mesh_names)}={parts} does not divide: choose a mesh axis that divides "
                f"it, or give {remedy}"
            )
        entries.append(None if parts == 1 or size % parts else axis)
    return entries
