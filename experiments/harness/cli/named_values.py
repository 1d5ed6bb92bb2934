"""Functions and classes by name, as package.module:name."""

import importlib
import re
import sys
from typing import Any

from jaxformer.errors import ConfigError

_NAME = re.compile(r"(?!(?:hf|sacrebleu):)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_name(name: str) -> bool:
    """Whether `name` has the form package.module:name, which no built-in name has."""
    return _NAME.fullmatch(name) is not None


def import_by_name(name: str, option: str) -> Any:
    """The function or class `package.module:name`, which was given to `option`.

    Raises `ConfigError` for a name of another form, a module or attribute that does not exist, and
    a value that cannot be called.
    """
    if not is_import_name(name):
        raise ConfigError(f"{option}={name!r} is not a name of the form package.module:name")
    path, _, attributes = name.partition(":")
    try:
        value = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise ConfigError(
            f"{option}={name!r}: there is no module {error.name!r}: start the command in the "
            "folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{option}={name!r}: the module {path!r} has no {attributes!r}")
        value = getattr(value, attribute)
    if not callable(value):
        kind = type(value).__name__
        raise ConfigError(
            f"{option}={name!r} is not callable, but {kind}: name a function or class"
        )
    return value


def name_of(value: Any, option: str) -> str:
    """The name `package.module:name` under which `import_by_name` finds `value` again.

    Raises `ConfigError` for a value without one, such as a lambda or a function within a function.
    """
    path, attributes = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    main = path == "__main__"
    if main:  # a module that was started with python -m has a name besides
        path = getattr(sys.modules[path].__spec__, "name", "")
    name = f"{path}:{attributes}"
    if not is_import_name(name) or not (main or import_by_name(name, option) is value):
        raise ConfigError(
            f"{option}={value!r} cannot be found again by a name, so the run could not record what "
            "it was built with: define it at the top level of a module that can be imported"
        )
    return name
