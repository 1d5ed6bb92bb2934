"""Where each parameter lives on a mesh: one table over parameter paths, outside the modules."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxformer.config import ConfigError


class Rule(NamedTuple):
    """How the parameters whose path `pattern` (a regular expression) finds are placed.

    `spec`: the mesh axis of each dimension. `fsdp`: the largest of the dimensions still free that
    divides is kept in parts by the fsdp axis. `uneven`: what happens when a dimension named in
    `spec` does not divide; replicating costs memory only.
    """

    pattern: str
    spec: PartitionSpec
    fsdp: bool = False
    uneven: Literal["refuse", "replicate"] = "refuse"


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
    Rule(r"(^|/)relative_bias/table$", _P(None, "tensor")),  # [buckets, N]
    Rule(r"(^|/)(kernel|table)$", _P(), fsdp=True),
)
"""The first rule that finds a path decides; what none finds (norms, other biases) is replicated.

With `tensor`, heads and the columns and rows of the feed-forward network are divided as in
Shoeybi et al. 2019, section 3. With `fsdp`, parameters, moments and averages are kept in parts as
in Rajbhandari et al. 2020 (ZeRO); a step gathers the parameters for its gradient.
"""


def partition_specs(
    params: Any, rules: Sequence[Rule], sizes: Mapping[str, int]
) -> dict[str, PartitionSpec]:
    """`path/of/leaf` -> its `PartitionSpec` on a mesh with axes of `sizes`.

    Raises `ConfigError`, naming the parameter and the numbers, where a rule does not fit.
    """
    found = {path_of(path): leaf.shape for path, leaf in _leaves(params)}
    return {path: _spec(path, shape, rules, sizes) for path, shape in found.items()}


def path_of(path: tuple[Any, ...]) -> str:
    """A path of keys as "path/of/leaf"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def following(
    tree: Any, params: Any, specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec]:
    """`path/of/leaf` of `tree` -> the spec of the parameter it belongs to.

    An optimizer's moments and the moving average end in a parameter's path and have its shape;
    whatever does not is replicated.
    """
    shapes = {path_of(path): leaf.shape for path, leaf in _leaves(params)}
    found = {}
    for path, leaf in _leaves(tree):
        owners = (path_of(path[start:]) for start in range(len(path)))
        mine = (specs[owner] for owner in owners if shapes.get(owner) == leaf.shape)
        found[path_of(path)] = next(mine, PartitionSpec())
    return found


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _spec(
    path: str, shape: tuple[int, ...], rules: Sequence[Rule], sizes: Mapping[str, int]
) -> PartitionSpec:
    rule = next((rule for rule in rules if re.search(rule.pattern, path)), Rule("", _P()))
    if len(rule.spec) > len(shape):
        raise ConfigError(
            f"{path} has shape {shape}, but the rule {rule.pattern!r} places "
            f"{len(rule.spec)} dimensions: write a rule of at most {len(shape)}"
        )
    axes = [_axis(path, rule, shape, i, sizes) for i in range(len(shape))]
    if rule.fsdp and sizes["fsdp"] > 1 and "fsdp" not in _names(rule.spec):
        free = [i for i, axis in enumerate(axes) if axis is None and not shape[i] % sizes["fsdp"]]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "fsdp"
    while axes and axes[-1] is None:  # as XLA writes it: an equal spec is the same program
        axes.pop()
    return PartitionSpec(*axes)


def _axis(path: str, rule: Rule, shape: tuple[int, ...], i: int, sizes: Mapping[str, int]) -> Any:
    """The mesh axis of dimension `i`, or None where it need not or cannot be divided."""
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


def _names(axes: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes in a spec, whose entries are names, tuples of names, or None."""
    groups = (axis if isinstance(axis, tuple) else (axis,) for axis in axes)
    return tuple(name for group in groups for name in group if name is not None)
