"""Modules that check what they are given, by the same sentences as a recipe."""

from dataclasses import fields
from functools import cache
from typing import Any

from flax import linen as nn
from jax.core import Tracer

from jaxformer.config.checks import check_fields


class CheckedModule(nn.Module):
    """The base of modules: `ConfigError` for a value that a field's annotation excludes.

    The fields of its direct subclasses are checked when a module is made. Further fields that your
    own subclass of one of them declares are yours.

    >>> jf.Norm("batch")
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: kind='batch' is unknown: give one of layer, rms
    """

    def __post_init__(self) -> None:
        kinds = {
            name: kind
            for name, kind in _checked_fields(type(self)).items()  # type: ignore[arg-type]
            if not isinstance(getattr(self, name), Tracer)  # such as a layer's number in a loop
        }
        check_fields(self, kinds)
        super().__post_init__()


@cache
def _checked_fields(kind: type) -> dict[str, Any]:
    """The annotation of each field that a direct subclass of `CheckedModule` declares."""
    declared = set[str]()
    for base in kind.__mro__:
        if CheckedModule in base.__bases__:
            declared |= vars(base).get("__annotations__", {}).keys()
    declared -= {"parent", "name"}
    return {field.name: field.type for field in fields(kind) if field.name in declared}
