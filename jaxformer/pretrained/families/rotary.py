"""Rotary positions in config.json: the base, the scaling and the part of a head."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxformer.config import Linear, Llama3, NoScaling, Rotary, TransformerConfig, Yarn
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import (
    Setting,
    as_text,
    const_field,
    field,
    optional_field,
    parse_number,
    unsupported,
)

_FRACTION = "partial_rotary_factor"


_FACTOR = field("factor", "factor", 1.0)
_ORIGINAL_LEN = field(
    "original_max_position_embeddings", "original_len", lambda fields: fields["max_len"]
)
# The keys of each kind of scaling.
_SCALINGS: dict[type[NoScaling], tuple[Setting, ...]] = {
    NoScaling: (),
    Linear: (_FACTOR,),
    Llama3: (
        _FACTOR,
        field("low_freq_factor", "low_freq_factor", 1.0),
        field("high_freq_factor", "high_freq_factor", 4.0),
        _ORIGINAL_LEN,
    ),
    Yarn: (
        _FACTOR,
        field("beta_fast", "beta_fast", 32.0),
        field("beta_slow", "beta_slow", 1.0),
        _ORIGINAL_LEN,
        optional_field("attention_factor", "attention_factor", None, kind=float),
        const_field("truncate", True),
    ),
}
_NAMES = {"default": NoScaling, "linear": Linear, "llama3": Llama3, "yarn": Yarn}


def rotary(base: str = "rope_theta", fraction: str = "", default_fraction: float = 1.0) -> Setting:
    """The base and the scaling of rotary positions, which newer versions store in one object.

    `base` and `fraction` are the keys of older versions. Without `fraction` whole heads are
    rotated.
    """
    keys = (base, "rope_parameters", "rope_scaling", *([fraction] if fraction else []))
    read = partial(_read, base, fraction, default_fraction)
    return Setting(keys, read, partial(_write, base, fraction))


def _read(
    base: str,
    fraction: str,
    default_fraction: float,
    hf: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The positions; `ConfigError` for another scaling."""
    scaling = NoScaling()
    numbers = {base: hf.get(base), fraction: hf.get(fraction)}
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf.get(key) or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{key}={as_text(rope)}, but it must be an object")
        kind = _kind(key, rope)
        known = {key for setting in _SCALINGS[kind] for key in setting.keys}
        known |= {"rope_theta", "rope_type", "type", *([_FRACTION] if fraction else [])}
        for name in rope.keys() - known:
            raise ConfigError(f"{key}.{name}={as_text(rope[name])} is not supported: remove it")
        numbers[base] = rope.get("rope_theta", numbers[base])
        numbers[fraction] = rope.get(_FRACTION, numbers[fraction])
        if kind is not NoScaling:
            values: dict[str, Any] = {}
            for setting in _SCALINGS[kind]:
                values |= setting.read(rope, fields)
            scaling = kind(**values)

    def number(key: str, default: float) -> float:
        return parse_number(key, default if numbers[key] is None else numbers[key], float)

    rotated = number(fraction, default_fraction) if fraction else 1.0
    return {"positions": Rotary(number(base, 10_000.0), rotated, scaling)}


def _kind(key: str, rope: Mapping[str, Any]) -> type[NoScaling]:
    """The kind of scaling, which has an older key too."""
    kinds = [rope[x] for x in ("rope_type", "type") if rope.get(x) not in (None, "default")]
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in _NAMES or kinds[1:] not in ([], [kind]):
        raise unsupported(f"{key}.rope_type", kind, *_NAMES)
    return _NAMES[kind]


def _write(base: str, fraction: str, config: TransformerConfig) -> dict[str, Any]:
    """The keys and their values."""
    positions: Any = config.positions
    kind = type(positions.scaling)
    if kind not in _SCALINGS:
        raise ConfigError(f"scaling={positions.scaling} is not supported")
    old = {base: positions.base} | ({fraction: positions.fraction} if fraction else {})
    rope = {"rope_theta": positions.base}
    rope["rope_type"] = next(name for name, named in _NAMES.items() if named is kind)
    rope |= {_FRACTION: positions.fraction} if fraction else {}
    for setting in _SCALINGS[kind]:
        rope |= setting.write(positions.scaling)
    return old | {"rope_parameters": rope}
