"""The families of published models that can be read and written."""

from collections.abc import Mapping
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.pretrained.families.bart import BART, M2M100, MARIAN, MBART
from jaxformer.pretrained.families.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from jaxformer.pretrained.families.gpt import GPT2, GPT_NEOX, OPT
from jaxformer.pretrained.families.llama import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from jaxformer.pretrained.families.t5 import MT5, T5
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import Kind

_ALL = (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OLMO2,
    GEMMA,
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    QWEN3_MOE,
    OPT,
    GPT_NEOX,
    DISTILBERT,
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    MARIAN,
    BART,
    MBART,
    M2M100,
    T5,
    MT5,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""`model_type` -> family, in the order in which `save_pretrained` tries them."""


def find(hf: Mapping[str, Any]) -> tuple[Family, Kind]:
    """The family and kind of model of a config.json; `ConfigError` lists what is supported."""
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"model_type={name!r} is not supported: only {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    architectures = hf.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1:
        kind = family.architectures.get(str(architectures[0]))
        if kind is not None:
            return family, kind
    raise ConfigError(
        f"architectures={architectures!r} is not supported for {name}: only one of "
        f"{', '.join(family.architectures)}"
    )


__all__ = ["FAMILIES", "find"]
