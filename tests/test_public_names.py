"""The names that `import jaxformer` offers, to people and checkers, without loading JAX."""

import ast
import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import jaxformer
from jaxformer import optional_dependencies
from jaxformer.errors import MissingExtra
from tests.two_processes import finished, start

LATE = {"orbax", "tokenizers", "matplotlib", "torch", "transformers", "sacrebleu"}
LATE |= {"safetensors", "huggingface_hub"}


def checked_imports() -> dict[str, str]:
    """Public name -> module, as type checkers read it."""
    tree = ast.parse(Path(jaxformer.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module for node in imports for name in node.names}


STAGES = (
    "import jaxformer",
    "import jaxformer.text.data, jaxformer.text.metrics, jaxformer.text.tokenizers",
    "from jaxformer import EncoderDecoder, TRANSFORMER_BASE",
)


def test_the_package_alone_texts_and_models_each_load_only_what_they_need():
    report = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = "import sys\n" + "\n".join(f"{stage}\n{report}" for stage in STAGES)
    (done,) = finished(start("-c", code))
    alone, texts, models = (set(line.split()) for line in done.out.splitlines())
    assert "jaxformer" in alone
    assert alone & {"jax", "flax", "optax", "numpy", *LATE} == set()
    assert "numpy" in texts
    assert texts & {"jax", "flax", *LATE} == set()
    assert "flax" in models
    assert models & LATE == set()


def test_type_checkers_and_python_find_every_public_name_in_the_same_place():
    assert set(jaxformer.__all__) == set(checked_imports()) | {"__version__"}
    for name, module in checked_imports().items():
        assert getattr(jaxformer, name) is getattr(importlib.import_module(module), name)


def test_help_begins_with_a_page_of_the_public_names_by_purpose():
    first, _, _ = jaxformer.__doc__.partition("\nCLASSES")
    lines = first.splitlines()
    assert len(lines) < 70 and max(map(len, lines)) <= 100
    assert set(checked_imports()) <= set(re.findall(r"\w+", first))


def test_the_version_is_that_of_the_installed_package():
    assert jaxformer.__version__ == version("jaxformer")


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="'Transformer'"):
        _ = jaxformer.Transformer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("torch", "models"), ("rich", "experiments"), ("sentencepiece", "subwords")],
)
def test_what_is_not_installed_is_named_with_its_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=f"{name} .*'{extra}'"):
        optional_dependencies.load(name)
