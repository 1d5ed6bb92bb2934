"""How each parameter is divided over a mesh: one table of rules about parameter paths."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from jaxformer.errors import ConfigError
from jaxformer.nn.stacking import is_stacked
from jaxformer.training.parameters import Params, flatten, layer_shape


class Rule(NamedTuple):
    """How parameters whose path matches `pattern` are divided over the mesh.

    >>> from jax.sharding import PartitionSpec
    >>> columns = Rule("(^|/)up/kernel$", PartitionSpec(None, "tensor"), fsdp=True)
    >>> params = {"up": {"kernel": np.ones((6, 8))}}
    >>> specs = partition_specs(params, [columns], {"data": 1, "fsdp": 3, "tensor": 2})
    >>> tuple(specs["up/kernel"])  # 3 x 2 parts of 2 x 4
    ('fsdp', 'tensor')
    """

    pattern: str
    """A regular expression, searched for in "path/of/leaf"."""
    spec: PartitionSpec
    """The mesh axis of each dimension."""
    fsdp: bool = False
    """Divides the largest dimension that is still free and divisible along the fsdp axis.

    Applies to parameters of at least two dimensions.
    """
    uneven: Literal["refuse", "replicate"] = "refuse"
    """What happens if a mesh axis of `spec` does not divide its dimension.

    "refuse" raises an error. "replicate" does not divide the dimension, which only costs memory.
    """


_P = PartitionSpec

RULES = (
    Rule(r"(^|/)query/kernel$", _P(None, "tensor", None), fsdp=True),  # [D, N, H]
    Rule(r"(^|/)query/bias$", _P("tensor", None)),
    Rule(r"(^|/)(key|value)/kernel$", _P(None, "tensor", None), fsdp=True, uneven="replicate"),
    Rule(r"(^|/)(key|value)/bias$", _P("tensor", None), uneven="replicate"),
    Rule(r"(^|/)out/kernel$", _P("tensor", None, None), fsdp=True),  # [N, H, D]
    Rule(r"(^|/)(gate|up)/kernel$", _P(None, "tensor"), fsdp=True),  # [D, F]
    Rule(r"(^|/)(gate|up)/bias$", _P("tensor")),
    Rule(r"(^|/)down/kernel$", _P("tensor", None), fsdp=True),  # [F, D]
    Rule(r"(^|/)(source_)?embedding/table$", _P("tensor", None), fsdp=True, uneven="replicate"),
    Rule(r"(^|/)output/kernel$", _P(None, "tensor"), fsdp=True, uneven="replicate"),  # [D, V]
    Rule(r"(^|/)output/bias$", _P("tensor"), uneven="replicate"),  # [V]
    Rule(r"(^|/)positions/relative_bias$", _P(None, "tensor")),  # [buckets, N]
    Rule(r"", _P(), fsdp=True),  # everything else; vectors are replicated
)
"""The first rule whose pattern matches a path decides.

The tensor axis divides heads, and columns and rows of the feed-forward network, as in Shoeybi et
al. 2019, section 3. The fsdp axis divides parameters, moments and averages as in Rajbhandari et
al. 2020 (ZeRO); a step gathers the parameters to compute its gradient.
"""


def partition_specs(
    params: Params, rules: Sequence[Rule], sizes: Mapping[str, int]
) -> dict[str, PartitionSpec]:
    """{"path/of/leaf": its `PartitionSpec`} on a mesh with axes of `sizes`.

    A parameter that no rule matches is replicated. Raises `ConfigError`, with the parameter and
    the numbers, where a rule does not fit. The layer axis of stacked blocks is not divided, and
    does not count in a rule's dimensions.

    >>> params = {"embedding": {"table": np.ones((6, 8))}, "norm": {"scale": np.ones(8)}}
    >>> specs = partition_specs(params, RULES, {"data": 1, "fsdp": 1, "tensor": 2})
    >>> tuple(specs["embedding/table"]), tuple(specs["norm/scale"])
    (('tensor',), ())
    """

    def spec(path: str, leaf: Any) -> PartitionSpec:
        of_layer = _spec(path, layer_shape(path, leaf), rules, sizes)
        return PartitionSpec(None, *of_layer) if is_stacked(path) and of_layer else of_layer

    return {path: spec(path, leaf) for path, leaf in flatten(params).items()}


def inherited_specs(
    tree: Any, params: Params, specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """{"path/of/leaf" of `tree`: the spec of the parameter that the leaf belongs to}.

    A leaf belongs to a parameter if its path ends in the parameter's path and the shapes are equal,
    as for moments and moving averages. Every other leaf is replicated.
    """
    shapes = {path: leaf.shape for path, leaf in flatten(params).items()}
    found = {}
    for path, leaf in flatten(tree).items():
        parts = path.split("/")
        owners = ("/".join(parts[start:]) for start in range(len(parts)))
        matching = (specs[owner] for owner in owners if shapes.get(owner) == leaf.shape)
        found[path] = next(matching, PartitionSpec())
    return found


def _spec(
    path: str, shape: tuple[int, ...], rules: Sequence[Rule], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec of the parameter at `path`, from the first rule that matches."""
    rule = next((rule for rule in rules if re.search(rule.pattern, path)), Rule("", _P()))
    if len(rule.spec) > len(shape):
        raise ConfigError(
            f"{path} has shape {shape}, but the spec of the rule {rule.pattern!r} has "
            f"{len(rule.spec)} dimensions: write a rule with at most {len(shape)}"
        )
    axes = [_axis(path, rule, shape, i, sizes) for i in range(len(shape))]
    if rule.fsdp and len(shape) > 1 and sizes["fsdp"] > 1 and "fsdp" not in _names(rule.spec):
        free = [i for i, axis in enumerate(axes) if axis is None and not shape[i] % sizes["fsdp"]]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "fsdp"
    while axes and axes[-1] is None:  # XLA's form: any other form would compile again
        axes.pop()
    return PartitionSpec(*axes)


def _axis(path: str, rule: Rule, shape: tuple[int, ...], i: int, sizes: Mapping[str, int]) -> Any:
    """The mesh axis of dimension `i`, or None where it is not divided."""
    axis = rule.spec[i] if i < len(rule.spec) else None
    names = _names((axis,))
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ConfigError(
            f"the rule {rule.pattern!r} names the mesh axis {unknown[0]!r}: give one of "
            f"{', '.join(sizes)}"
        )
    parts = math.prod(sizes[name] for name in names)
    if parts == 1:
        return None
    if shape[i] % parts == 0:
        return axis
    if rule.uneven == "replicate":
        return None
    raise ConfigError(
        f"dimension {i} of {path} {list(shape)} has size {shape[i]}, which {'*'.join(names)}="
        f"{parts} does not divide: choose a mesh axis that divides it, or pass a rule for "
        "it with uneven='replicate'"
    )


def _names(axes: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes in a spec, whose entries are names, tuples of names, or None."""
    groups = (axis if isinstance(axis, tuple) else (axis,) for axis in axes)
    return tuple(name for group in groups for name in group if name is not None)
