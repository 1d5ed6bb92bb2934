"""Position schemes by name, and recipes changed by dotted fields."""

from jaxformer.config import (
    Alibi,
    Learned,
    NoPositions,
    PositionScheme,
    Relative,
    Rotary,
    Sinusoidal,
    with_fields,
)

__all__ = ["SCHEMES", "with_fields"]

SCHEMES: dict[str, PositionScheme] = {
    "sinusoidal": Sinusoidal(),
    "learned": Learned(),
    "rotary": Rotary(),
    "alibi": Alibi(),
    "relative": Relative(),
    "none": NoPositions(),
}
