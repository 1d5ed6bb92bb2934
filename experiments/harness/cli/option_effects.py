"""Options that have no effect with the other settings: one that was typed is refused."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxformer.errors import ConfigError


def refuse_without_effect(config: Any, options: Iterable[str]) -> None:
    """Raises `ConfigError` for the first of the dotted `options` that changes nothing in `config`.

    A configuration tells by its method `without_effect`, if it has one: a mapping of an option, or
    of a group of options, to the reason; "" is an option of a group that has an effect.
    """
    reasons = _reasons_of(config)
    for option in options:
        if reason := _reason(option, reasons):
            raise ConfigError(f"--{option} has no effect: {reason}. Leave it out")


def refuse_without_effect_in_all(
    configs: Sequence[Any], options: Iterable[str], *, varied: bool
) -> None:
    """Raises `ConfigError` for the first of `options` that changes nothing in any of `configs`.

    `configs` are the cells of a sweep, and `varied` says that its cells differ in `options`.
    """
    reasons_of_cells = [_reasons_of(config) for config in configs]
    for option in options:
        why = [_reason(option, reasons) for reasons in reasons_of_cells]
        if all(why):
            given = f"varying {option}" if varied else f"--{option}"
            raise ConfigError(f"{given} has no effect in any cell: {why[0]}. Leave it out")


def _reasons_of(config: Any) -> Mapping[str, str]:
    return config.without_effect() if hasattr(config, "without_effect") else {}


def _reason(option: str, reasons: Mapping[str, str]) -> str:
    """The entry of `option`, or of the smallest group that holds it; "" where there is none."""
    name = option
    while name:
        if name in reasons:
            return reasons[name]
        name = name.rpartition(".")[0]
    return ""
