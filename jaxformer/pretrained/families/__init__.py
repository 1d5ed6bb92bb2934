"""The families of models that weights can be exchanged with."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import ConfigError
from jaxformer.pretrained.families import bert, distilbert, gpt2, llama, marian, t5
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.subjects import Kind

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (gpt2, llama, distilbert, bert, marian, t5)
}
"""`model_type` -> family, in the order in which `save_pretrained` tries them."""


def find(theirs: Mapping[str, Any]) -> tuple[Family, Kind]:
    """The family and the kind of model of their config.json; `ConfigError` lists what is known."""
    name = theirs.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"model_type={name!r} is not known: only {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    architectures = theirs.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1:
        kind = family.architectures.get(str(architectures[0]))
        if kind is not None:
            return family, kind
    raise ConfigError(
        f"architectures={architectures!r} is not known for {name}: only one of "
        f"{', '.join(family.architectures)}"
    )


__all__ = ["FAMILIES", "find"]
