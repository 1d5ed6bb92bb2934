"""Options that have no effect with the other settings: one that was typed is refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxformer.errors import ConfigError


def refuse_without_effect(config: Any, options: Iterable[str]) -> None:
    """Raises `ConfigError` for the first of the dotted `options` that changes nothing in `config`.

    A configuration tells by its method `without_effect`, if it has one: a mapping of an option, or
    of a group of options, to the reason; "" is an option of a group that has an effect.
    """
    reasons = config.without_effect() if hasattr(config, "without_effect") else {}
    for option in options:
        if reason := _reason(option, reasons):
            raise ConfigError(f"--{option} has no effect: {reason}. Leave it out")


def _reason(option: str, reasons: Mapping[str, str]) -> str:
    """The entry of `option`, or of the smallest group that holds it; "" where there is none."""
    name = option
    while name:
        if name in reasons:
            return reasons[name]
        name = name.rpartition(".")[0]
    return ""
