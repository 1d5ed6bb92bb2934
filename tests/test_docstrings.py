"""The examples in docstrings: each name of `jaxformer` has one, and each runs."""

import doctest
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxformer

# What an example may use without importing it, besides the names of its own module.
NAMESPACE = {"Path": Path, "jax": jax, "jf": jaxformer, "jnp": jnp, "nn": nn, "np": np}
NAMESPACE |= {"nnx": nnx, "optax": optax}
PACKAGE = Path(jaxformer.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text("utf-8")]
LONG = ("nn", "pipelines", "pretrained")
"""Layers whose examples compile models."""
MODULES = [
    pytest.param(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts),
        marks=pytest.mark.long if path.relative_to(PACKAGE).parts[0] in LONG else (),
    )
    for path in FILES
]


def test_each_public_function_and_class_has_an_example():
    values = {name: getattr(jaxformer, name) for name in jaxformer.__all__}
    public = {n: x for n, x in values.items() if inspect.isclass(x) or inspect.isfunction(x)}
    assert len(public) > 40
    assert [name for name, x in public.items() if ">>> " not in (x.__doc__ or "")] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_print_what_they_say(module, tmp_path, monkeypatch):
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    imported = importlib.import_module(module)
    for example in finder.find(imported, globs=NAMESPACE | vars(imported)):
        (tmp_path / example.name).mkdir()
        monkeypatch.chdir(tmp_path / example.name)  # some write files
        runner.run(example, out=said.append)
    assert runner.tries and not said, "".join(said)
