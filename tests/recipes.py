"""Recipes for tests, changed by dotted fields."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxformer.config import (
    Alibi,
    Learned,
    NoPositions,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
)

SCHEMES: dict[str, PositionScheme] = {
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "rotary": Rotary(),
    "alibi": Alibi(),
    "relative": Relative(),
    "none": NoPositions(),
}


def with_fields(config: Any, fields: Mapping[str, Any]) -> Any:
    """`config` with each dotted field replaced, such as {"norm.placement": "pre"}."""
    for name, value in fields.items():
        part, _, rest = name.partition(".")
        value = with_fields(getattr(config, part), {rest: value}) if rest else value
        config = replace(config, **{part: value})
    return config
