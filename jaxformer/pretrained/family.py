"""A family of published models: its config.json, its classes and its weight map."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.config_mapping import Setting, read_fields
from jaxformer.pretrained.model_specs import Kind, ModelSpec
from jaxformer.pretrained.weight_map import WeightMap


def identity(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` itself."""
    return spec


class Family(NamedTuple):
    """What is needed to read and write the folders of a `model_type`.

    Tensors have the names that they have in a model with a head.
    """

    model_type: str
    """`model_type` in config.json."""
    architectures: Mapping[str, Kind]
    """The kind of model of each class; the first class of a kind is written."""
    constants: Mapping[str, Any]
    """Fields of our config that all models of the family share."""
    settings: Sequence[Setting]
    """How the other fields are read and written."""
    weight_map: Callable[[ModelSpec, Mapping[str, Any]], WeightMap]
    """A spec and config.json -> the entries of its weight map."""
    prefix: str
    """What tensor names begin with; the names of a model without a head lack it."""
    head_prefixes: tuple[str, ...]
    """What names of tensors of heads begin with; these never have `prefix`."""
    adapt: Callable[[ModelSpec, Collection[str]], ModelSpec] = identity
    """A spec and the names of a folder's tensors -> the spec of what the folder stores."""
    renamed_endings: Mapping[str, str] = {}
    """Old endings of tensor names and their current ones."""
    ignored_tensors: str = r"(?!)"
    """A regular expression for names of tensors that are no parameters."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json that do not change what the model computes."""
    classifier_tensor: str = ""
    """The tensor whose first axis is that of a classifier's classes."""


def read_config(family: Family, hf: Mapping[str, Any]) -> TransformerConfig:
    """Our config for the config.json `hf`; `ConfigError` names what is not supported."""
    fields = read_fields(family.settings, family.ignored_keys, hf)
    return TransformerConfig(**{**family.constants, **fields})


def write_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, without ids of tokens.

    Raises `ConfigError`, naming them, for fields that the family does not support.
    """
    names = [name for name, kind in family.architectures.items() if kind == spec.kind]
    if not names:
        raise ConfigError(f"it has no {spec.kind.replace('_', ' ')}")
    hf: dict[str, Any] = {"architectures": names[:1], "model_type": family.model_type}
    for setting in family.settings:
        hf |= setting.write(spec.config)
    read = ModelSpec(spec.kind, read_config(family, hf), spec.classes)
    read = family.adapt(read, {name for entry in family.weight_map(spec, hf) for name in entry.hf})
    wanted, found = spec.effective_fields(), read.effective_fields()
    wrong = [
        f"{name}={wanted[name]!r}, but it has {found.get(name)!r}"
        for name in wanted
        if wanted[name] != found.get(name)
    ]
    if read.kind != spec.kind or wrong:
        raise ConfigError("; ".join(wrong) or f"it has no {spec.kind.replace('_', ' ')}")
    return hf


def canonical_names(family: Family, names: Iterable[str]) -> dict[str, str]:
    """The name in the weight map -> the name in the folder, without ignored tensors.

    Raises `DataError` for two names of one tensor.
    """
    names = list(names)
    bare = not any(name.startswith(family.prefix) for name in names)
    found: dict[str, str] = {}
    for name in names:
        canonical = _with_current_ending(family, name)
        if bare and not canonical.startswith(family.head_prefixes):
            canonical = family.prefix + canonical
        if re.search(family.ignored_tensors, canonical):
            continue
        if canonical in found:
            raise DataError(f"{found[canonical]} and {name} are two names of one tensor")
        found[canonical] = name
    return found


def _with_current_ending(family: Family, name: str) -> str:
    for old, new in family.renamed_endings.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
