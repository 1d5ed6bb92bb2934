"""Rotary positions in config.json: the bases, the scaling and the part of a head."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxformer.config import Linear, Llama3, NoScaling, Rotary, TransformerConfig, Yarn
from jaxformer.errors import ConfigError
from jaxformer.pretrained import config_keys

_FRACTION, _MSCALE = "partial_rotary_factor", "attention_factor"

_FACTOR = config_keys.number("factor", "factor", 1.0)
_ORIGINAL_LEN = config_keys.number(
    "original_max_position_embeddings", "original_len", lambda fields: fields["max_len"]
)
# The keys of each kind of scaling.
_SCALINGS: dict[type[NoScaling], tuple[config_keys.Key, ...]] = {
    NoScaling: (),
    Linear: (_FACTOR,),
    Llama3: (
        _FACTOR,
        config_keys.number("low_freq_factor", "low_freq_factor", 1.0),
        config_keys.number("high_freq_factor", "high_freq_factor", 4.0),
        _ORIGINAL_LEN,
    ),
    Yarn: (
        _ORIGINAL_LEN,
        config_keys.number(
            "factor", "factor", lambda fields: fields["max_len"] / fields["original_len"]
        ),
        config_keys.number("beta_fast", "beta_fast", 32.0),
        config_keys.number("beta_slow", "beta_slow", 1.0),
        config_keys.number("attention_factor", "attention_factor", None, kind=float, nullable=True),
        config_keys.constant("truncate", True),
    ),
}
_NAMES = {"default": NoScaling, "linear": Linear, "llama3": Llama3, "yarn": Yarn}


class _OlderKeys(NamedTuple):
    """The keys that older versions store outside of the object, and the defaults of all versions.

    Without a key of the `fraction` whole heads are rotated.
    """

    base: str
    fraction: str
    default_base: float
    default_fraction: float


def rotary(
    base: str = "rope_theta",
    fraction: str = "",
    default_fraction: float = 1.0,
    default_base: float = 10_000.0,
) -> config_keys.Key:
    """The base and the scaling of rotary positions, which newer versions store in one object.

    `base` and `fraction` are the keys of older versions. Without `fraction` whole heads are
    rotated, and a "partial_rotary_factor" of scaled positions is refused: transformers cannot
    compute it either.
    """
    older = _OlderKeys(base, fraction, default_base, default_fraction)
    names = (base, "rope_parameters", "rope_scaling", fraction or _FRACTION, _ORIGINAL_LEN.names[0])
    return config_keys.Key(names, partial(_read, older), partial(_write, base, fraction))


def _read(older: _OlderKeys, hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The positions; `ConfigError` for another scaling.

    As in transformers, "rope_scaling" hides "rope_parameters", and both hide the older keys.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = _numbers(name, hf.get(name))
    kind = _kind(name, rope)
    ignored = _unknown_keys(name, rope, kind)
    if not older.fraction:
        fraction = rope.get(_FRACTION, hf.get(_FRACTION))
        if fraction not in (None, 1) and kind is not NoScaling:
            raise config_keys.unsupported(_FRACTION, fraction, 1.0)
        if fraction:
            ignored.add(_FRACTION)
    config_keys.warn_ignored((f"{name}.{key}" for key in ignored), "this scaling")
    scaling = _scaling(kind, rope, hf, fields)
    rotated = 1.0
    if older.fraction:
        rotated = _number(name, rope, _FRACTION, hf, older.fraction, older.default_fraction)
    base = _number(name, rope, "rope_theta", hf, older.base, older.default_base)
    return {"positions": Rotary(base, rotated, scaling)}


def _unknown_keys(name: str, rope: Mapping[str, Any], kind: type[NoScaling]) -> set[str]:
    """The keys of the object `name` that its kind of scaling does not read."""
    known = {key for each in _SCALINGS[kind] for key in each.names}
    unknown = rope.keys() - known - {"rope_theta", "rope_type", "type", _FRACTION}
    if kind is Yarn and {"mscale", "mscale_all_dim"} <= unknown and not rope.get(_MSCALE):
        raise ConfigError(f"{name}.mscale is not supported: give {name}.{_MSCALE}, its result")
    return unknown


def _scaling(
    kind: type[NoScaling],
    rope: Mapping[str, Any],
    hf: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> NoScaling:
    """The scaling in the object `rope`; the original length may stand beside the object."""
    key = _ORIGINAL_LEN.names[0]
    if hf.get(key):
        rope = {**rope, key: hf[key]}
    values: dict[str, Any] = {}
    for each in _SCALINGS[kind]:
        values |= each.read(rope, {**fields, **values})
    return kind(**values)


def _number(
    name: str, rope: Mapping[str, Any], key: str, hf: Mapping[str, Any], old: str, default: float
) -> float:
    """The number under `key` of the object `name`, or else under the key `old` of config.json."""
    if rope.get(key) is not None:
        return config_keys.parse_number(f"{name}.{key}", rope[key], float)
    if hf.get(old) is not None:
        return config_keys.parse_number(old, hf[old], float)
    return default


def rotary_by_layer(base: float, window_base: float) -> config_keys.Key:
    """The positions of layers with a window and of the others, which have bases of their own.

    `base` and `window_base` stand for the ones that a config.json lacks.
    """
    old, local = "rope_theta", "rope_local_base_freq"
    full, windowed = "full_attention", "sliding_attention"

    def read(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        by_kind = hf.get("rope_parameters") or {}
        if not isinstance(by_kind, dict) or not by_kind.keys() <= {full, windowed}:
            raise config_keys.unsupported("rope_parameters", by_kind, {full: {}, windowed: {}})
        full_rope = _numbers(full, by_kind.get(full))
        windowed_rope = _numbers(windowed, by_kind.get(windowed))
        scaling = _numbers("rope_scaling", hf.get("rope_scaling"))
        if _kind(windowed, windowed_rope) is not NoScaling:
            raise config_keys.unsupported(
                f"rope_parameters.{windowed}", windowed_rope, {"rope_type": "default"}
            )
        hf_of_full = {
            **hf,
            old: hf.get(old) or base,
            "rope_parameters": full_rope | scaling,
            "rope_scaling": None,
        }
        older = _OlderKeys(old, "", base, 1.0)
        positions = _read(older, hf_of_full, fields)["positions"]
        if fields["window.size"] is not None:
            theta = windowed_rope.get("rope_theta") or hf.get(local) or window_base
            window_theta = config_keys.parse_number(local, theta, float)
            positions = replace(positions, window_base=window_theta)
        return {"positions": positions}

    def write(config: TransformerConfig) -> dict[str, Any]:
        positions: Any = config.positions
        theta = positions.base if positions.window_base is None else positions.window_base
        hf = _write(old, "", config)
        other = {"rope_type": "default", "rope_theta": theta}
        return hf | {
            local: theta,
            "rope_parameters": {full: hf["rope_parameters"], windowed: other},
        }

    return config_keys.Key((local, *rotary().names), read, write)


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """The object `name`, empty if absent; `ConfigError` for what is no object of numbers."""
    value = value or {}
    if not isinstance(value, dict) or any(isinstance(each, dict) for each in value.values()):
        raise ConfigError(
            f"{name}={config_keys.as_text(value)}, but it must be an object of numbers"
        )
    return value


def _kind(key: str, rope: Mapping[str, Any]) -> type[NoScaling]:
    """The kind of scaling, which has an older key too."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _NAMES:
        raise config_keys.unsupported(f"{key}.rope_type", kind, *_NAMES)
    return _NAMES[kind]


def _write(base: str, fraction: str, config: TransformerConfig) -> dict[str, Any]:
    """The keys and their values."""
    positions: Any = config.positions
    kind = type(positions.scaling)
    if kind not in _SCALINGS:
        raise ConfigError(f"scaling={positions.scaling} is not supported")
    old = {base: positions.base}
    rope = {"rope_theta": positions.base}
    rope["rope_type"] = next(name for name, named in _NAMES.items() if named is kind)
    if fraction:
        old[fraction] = positions.fraction
        rope[_FRACTION] = positions.fraction
    for each in _SCALINGS[kind]:
        rope |= each.write(positions.scaling)
    return old | {"rope_parameters": rope}
