"""Your own functions and classes, by their names package.module:name."""

import importlib
import sys
from typing import Any

from experiments.harness.cli.config_files import is_own
from jaxformer.errors import ConfigError


def resolve(name: str, kind: str) -> Any:
    """The function or class `package.module:name`; `kind` is the option that it was given to.

    Raises `ConfigError` for a name of another form, a module or attribute that is not there, and
    a value that cannot be called.
    """
    if not is_own(name):
        raise ConfigError(f"{kind}={name!r} is not a name of the form package.module:name")
    path, _, words = name.partition(":")
    try:
        value = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ConfigError(
            f"{kind}={name!r}: there is no module {error.name!r}: start the command in the folder "
            "that holds it, or put that folder on PYTHONPATH"
        ) from error
    for word in words.split("."):
        if not hasattr(value, word):
            raise ConfigError(f"{kind}={name!r}: the module {path!r} has no {words!r}")
        value = getattr(value, word)
    if not callable(value):
        raise ConfigError(
            f"{kind}={name!r} is not callable, but {type(value).__name__}: name a function or class"
        )
    return value


def name_of(value: Any, kind: str) -> str:
    """The name `package.module:name` under which `resolve` finds `value` again.

    Raises `ConfigError` for a value without one, such as a lambda or a function within a function.
    """
    path, words = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    main = path == "__main__"
    if main:  # a module that was started with python -m has a name besides
        path = getattr(sys.modules[path].__spec__, "name", "")
    name = f"{path}:{words}"
    if not is_own(name) or not (main or resolve(name, kind) is value):
        raise ConfigError(
            f"{kind}={value!r} cannot be found again by a name, so the run could not record what "
            "it was built with: define it at the top level of a module that can be imported"
        )
    return name
