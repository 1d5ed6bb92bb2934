"""The examples in the docstrings of the package: each public name has one, and each runs."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import jaxformer

pytestmark = pytest.mark.long

MODULES = ["jaxformer", *(m.name for m in pkgutil.walk_packages(jaxformer.__path__, "jaxformer."))]


def public(module: str) -> Iterator[tuple[str, Any]]:
    """The functions and classes of the package that `module` lists in its `__all__`."""
    namespace = importlib.import_module(module)
    for name in getattr(namespace, "__all__", ()):
        value = getattr(namespace, name)
        ours = getattr(value, "__module__", "").startswith("jaxformer")
        if ours and (inspect.isclass(value) or inspect.isfunction(value)):
            yield f"{value.__module__}.{value.__qualname__}", value


def test_each_public_function_and_class_has_an_example():
    found = {name: value for module in MODULES for name, value in public(module)}
    assert len(found) > 140
    assert [name for name, value in found.items() if ">>> " not in (value.__doc__ or "")] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_print_what_they_say(module, tmp_path, monkeypatch):
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for example in finder.find(importlib.import_module(module), globs={}):  # as a reader copies it
        (tmp_path / example.name).mkdir()
        monkeypatch.chdir(tmp_path / example.name)  # some write files
        runner.run(example, out=said.append)
    assert not said, "".join(said)
