"""The names that `import jaxformer` offers, to people and checkers, without loading JAX."""

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import jaxformer
from jaxformer import optional_dependencies
from jaxformer.errors import MissingExtra

LATE = {"orbax", "tokenizers", "matplotlib", "torch", "transformers", "sacrebleu"}
LATE |= {"safetensors", "huggingface_hub"}


def loaded_after(*lines: str) -> set[str]:
    """The top-level packages in a fresh interpreter after running `lines`."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", "\n".join([*lines, report])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def checked_imports() -> dict[str, str]:
    """Public name -> module, as type checkers read it."""
    tree = ast.parse(Path(jaxformer.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {name.name: node.module for node in block.body for name in node.names}


def test_importing_the_package_loads_nothing_else():
    loaded = loaded_after("import jaxformer")
    assert "jaxformer" in loaded
    assert loaded & {"jax", "flax", "optax", "numpy", *LATE} == set()


def test_asking_for_a_model_loads_only_what_models_need():
    loaded = loaded_after("from jaxformer import EncoderDecoder, TRANSFORMER_BASE")
    assert "flax" in loaded
    assert loaded & LATE == set()


def test_text_is_handled_without_jax():
    packages = "jaxformer.text.data, jaxformer.text.metrics, jaxformer.text.tokenizers"
    loaded = loaded_after(f"import {packages}")
    assert "numpy" in loaded
    assert loaded & {"jax", "flax", *LATE} == set()


def test_type_checkers_and_python_find_every_public_name_in_the_same_place():
    public = set(jaxformer.__all__) - {"__version__"}
    assert public == set(checked_imports())
    for name, module in checked_imports().items():
        assert getattr(jaxformer, name) is getattr(importlib.import_module(module), name)


def test_the_version_is_that_of_the_installed_package():
    assert jaxformer.__version__ == version("jaxformer")


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="'jaxformer' has no attribute 'Transformer'"):
        _ = jaxformer.Transformer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("torch", "peers"), ("rich", "experiments"), ("sentencepiece", "subwords")],
)
def test_what_is_not_installed_is_named_with_its_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"{name} is needed.*jaxformer\[{extra}\]"):
        optional_dependencies.load(name)
