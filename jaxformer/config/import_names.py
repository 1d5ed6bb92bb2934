"""Values of a user's own by name, package.module:name, and who may name them.

Importing a module runs it. So a name that a file brings (the config.json of a run, a configuration
file) is imported only if the reader says so, if it was given to this command, if a training of this
user recorded it, or if it names a model, a block or a part that this package defines.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flax import linen as nn

from jaxformer.config.checks import Checked
from jaxformer.errors import ConfigError

_NAME = re.compile(r"(?!hf:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_ROOT = Path(__file__).parents[2]  # holds `jaxformer` and, in a checkout, `experiments`


_EVERYTHING = "*"
_trusted: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())
"""The names that a file may bring in this context, or `_EVERYTHING`."""


def is_import_name(name: Any) -> bool:
    """Whether `name` has the form package.module:name, which no built-in name has."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


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
            f"{option}={name!r}: there is no module {error.name!r}: start Python in the folder "
            "that holds it, or put that folder on PYTHONPATH"
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


def import_module_class(name: str, option: str) -> Any:
    """The Flax module, or the function that makes one, `package.module:name`.

    Raises `ConfigError` as `import_by_name` does, and for another class.
    """
    value = import_by_name(name, option)
    if isinstance(value, type) and not issubclass(value, nn.Module):
        raise ConfigError(f"{option}={name!r} is a class, but no Flax module: name one")
    return value


def name_of(value: Any, option: str) -> str:
    """The name `package.module:name` under which `import_by_name` finds `value` again.

    Raises `ConfigError` for a value without one, such as a lambda, a function within a function, or
    what a script defines that was not started with `python -m`.
    """
    path, attributes = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    is_of_main = path == "__main__"
    if is_of_main:
        path = _name_of_main(value, option)
    name = f"{path}:{attributes}"
    if not is_import_name(name) or not (is_of_main or import_by_name(name, option) is value):
        raise ConfigError(
            f"{option}={value!r} cannot be found again by a name, so the run could not record what "
            "it was built with: define it at the top level of a module that can be imported"
        )
    return name


def _name_of_main(value: Any, option: str) -> str:
    """The name of the module that was started with `python -m`; `ConfigError` for another start."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    file = getattr(main, "__file__", None)  # a notebook has none
    start = "" if file is None else f"start it as python -m {Path(file).stem}, or "
    raise ConfigError(
        f"{option}={value!r} is defined in the program that was started, which no later command "
        f"can import: {start}define it in a file that the program imports"
    )


def trust(*names: str, trust_code: bool = False) -> None:
    """Lets files name these in this context; with `trust_code`, anything."""
    _trusted.set(_trusted.get() | {*names} | ({_EVERYTHING} if trust_code else set()))


@contextlib.contextmanager
def trusting(trust_code: bool) -> Iterator[None]:
    """Within it files may name anything, if `trust_code`."""
    before = _trusted.get()
    trust(trust_code=trust_code)
    try:
        yield
    finally:
        _trusted.set(before)


def check_trusted(content: Any, source: str | Path) -> None:
    """Raises `ConfigError` if `content`, plain JSON of the file `source`, names untrusted code."""
    trusted = _trusted.get()
    for field, name, value in names_in(content):
        known = {name, _EVERYTHING} & trusted or _is_recorded(field, value) or _is_ours(name, field)
        if not known:
            raise ConfigError(
                f"{source} names code that would be imported and run: {field}={name!r}. If you "
                "trust whoever wrote it, give --trust_code to the command, or trust_code=True to "
                "jf.load"
            )


def record_trusted(content: Any) -> None:
    """Records in the user's configuration folder that a training of this user names this code.

    A folder that cannot be written to is left as it is: the names are then asked for again.
    """
    with contextlib.suppress(OSError):
        for field, _, value in names_in(content):
            path = _record_of(field, value)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def names_in(content: Any, field: str = "") -> Iterator[tuple[str, str, Any]]:
    """All names of the form package.module:name in `content`, plain JSON.

    Each with the field that holds it before, and with the whole value of that field after it.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            if key == "type" and is_import_name(value):
                yield field, value, content
            else:
                yield from names_in(value, f"{field}.{key}" if field else key)
    elif isinstance(content, list):
        for item in content:
            yield from names_in(item, field)
    elif is_import_name(content):
        yield field, content, content


def _is_recorded(field: str, value: Any) -> bool:
    try:
        return _record_of(field, value).exists()
    except OSError:
        return False


def _record_of(field: str, value: Any) -> Path:
    """The file that says that `value` of `field` is trusted."""
    root = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    content = json.dumps([field, value], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Path(root).expanduser() / "jaxformer" / "trusted_code" / digest


def _is_ours(name: str, field: str) -> bool:
    """Whether `name` names a model, a block or a part that this package defines."""
    package = name.partition(".")[0].partition(":")[0]
    if package not in ("jaxformer", "experiments"):
        return False
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or Path(spec.origin).parents[1] != _ROOT:
        return False  # another package of this name
    try:
        value = import_by_name(name, field)
    except (ConfigError, ImportError):
        return False
    is_kind = isinstance(value, type) and issubclass(value, Checked | nn.Module)
    return is_kind and f"{value.__module__}:{value.__qualname__}" == name
