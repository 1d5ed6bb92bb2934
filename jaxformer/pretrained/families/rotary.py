"""Rotary positions in config.json: the base, the scaling and the part of a head."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained.family import (
    Setting,
    as_text,
    const_field,
    field,
    parse_number,
    unsupported,
)

_FRACTION = "partial_rotary_factor"


def _read_attention_factor(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our field; two older keys give it as a quotient."""

    def number(key: str) -> float:
        return parse_number(f"rope_parameters.{key}", rope[key], float)

    if rope.get("attention_factor") is not None:
        return {"rotary_attention_factor": number("attention_factor")}
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        log = math.log(max(number("factor"), 1.0)) if "factor" in rope else 0.0
        above, below = (0.1 * number(key) * log + 1 for key in ("mscale", "mscale_all_dim"))
        return {"rotary_attention_factor": above / below}
    return {"rotary_attention_factor": None}


def _write_attention_factor(config: TransformerConfig) -> dict[str, Any]:
    """The first key, unless it has its default."""
    factor = config.rotary_attention_factor
    return {} if factor is None else {"attention_factor": factor}


_FACTOR = field("factor", "rotary_factor", 1.0)
_ORIGINAL_LEN = field(
    "original_max_position_embeddings", "rotary_original_len", lambda fields: fields["max_len"]
)
# The keys of each kind of scaling.
_SCALINGS: dict[str, tuple[Setting, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        field("low_freq_factor", "rotary_low_freq_factor", 1.0),
        field("high_freq_factor", "rotary_high_freq_factor", 4.0),
        _ORIGINAL_LEN,
    ),
    "yarn": (
        _FACTOR,
        field("beta_fast", "rotary_beta_fast", 32.0),
        field("beta_slow", "rotary_beta_slow", 1.0),
        _ORIGINAL_LEN,
        Setting(
            ("attention_factor", "mscale", "mscale_all_dim"),
            _read_attention_factor,
            _write_attention_factor,
        ),
        const_field("truncate", True),
    ),
}


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
    """Our fields; `ConfigError` for another scaling."""
    found: dict[str, Any] = {}
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
        if kind != "default":
            found["rotary_scaling"] = kind
        for setting in _SCALINGS[kind]:
            found |= setting.read(rope, fields)
    given = numbers[base]
    found["rotary_base"] = parse_number(base, 10_000.0 if given is None else given, float)
    if fraction:
        given = default_fraction if numbers[fraction] is None else numbers[fraction]
        found["rotary_fraction"] = parse_number(fraction, given, float)
    return found


def _kind(key: str, rope: Mapping[str, Any]) -> str:
    """The kind of scaling, which has an older name too."""
    kinds = [rope[x] for x in ("rope_type", "type") if rope.get(x) not in (None, "default")]
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in _SCALINGS or kinds[1:] not in ([], [kind]):
        raise unsupported(f"{key}.rope_type", kind, *_SCALINGS)
    return kind


def _write(base: str, fraction: str, config: TransformerConfig) -> dict[str, Any]:
    """The keys and their values."""
    kind = "default" if config.rotary_scaling == "none" else config.rotary_scaling
    rope: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_type": kind}
    rope |= {_FRACTION: config.rotary_fraction} if fraction else {}
    for setting in _SCALINGS[kind]:
        rope |= setting.write(config)
    old = {base: config.rotary_base} | ({fraction: config.rotary_fraction} if fraction else {})
    return old | {"rope_parameters": rope}
