"""Imports go down only: from a layer of the package to layers below it."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxformer

PACKAGE = Path(jaxformer.__file__).parent

LAYERS = {
    "errors": 0,
    "config": 0,
    "optional_dependencies": 0,
    "storage": 0,
    "ops": 1,
    "nn": 2,
    "decoding": 3,
    "text": 4,
    "training": 5,
    "distributed": 6,
    "checkpoint": 6,
    "runtime": 6,
    "pretrained": 7,
    "pipelines": 8,
}
# etils and tensorstore are parts of orbax.
REQUIRED = {"jax", "flax", "optax", "orbax", "etils", "tensorstore", "numpy", "jaxtyping"}
REQUIRED_BY_TEXT = {"numpy", "jaxtyping"}
NEVER_IMPORTED = {"experiments", "tests", "torch", "transformers"}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything that `tree` imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def imported_on_load(tree: ast.AST) -> Iterator[str]:
    """Like `imported_names`, without function bodies and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_names(node)
        elif not late and not checking:
            yield from imported_on_load(node)


def other_packages(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"jaxformer"}


def violations(package: Path) -> list[str]:
    """A line for each import in `package` that breaks a rule."""
    found, graph = [], {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        where = path.relative_to(package)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        names = list(imported_names(tree))
        below = {name.split(".")[1] for name in names if name.startswith("jaxformer.")} - {module}
        graph.setdefault(module, set()).update(below)
        if module not in LAYERS:
            found.append(f"{where} belongs to no layer")
            continue
        for name in sorted(below):
            if LAYERS.get(name, 99) > LAYERS[module]:
                found.append(f"{where} imports {name}, a layer above it")
        found += [f"{where} imports {name} relatively" for name in names if name.startswith(".")]
        peers = other_packages(iter(names)) & NEVER_IMPORTED
        found += [f"{where} imports {name}" for name in sorted(peers)]
        allowed = REQUIRED_BY_TEXT if module == "text" else REQUIRED
        for name in sorted(other_packages(imported_on_load(tree)) - allowed):
            found.append(f"{where} imports {name} when it is loaded")
        if module == "text" and other_packages(iter(names)) & (REQUIRED - REQUIRED_BY_TEXT):
            found.append(f"{where} imports JAX")
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        found.append(f"layers import each other in a circle: {error.args[1]}")
    return found


def test_imports_of_the_package_go_down_only():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    "file, line, expected",
    [
        ("nn/a.py", "from jaxformer.training import losses", "imports training, a layer above"),
        (
            "ops/a.py",
            "def f():\n    from jaxformer.nn.models import X",
            "imports nn, a layer above",
        ),
        ("nn/a.py", "from .blocks import Block", "relatively"),
        ("nn/a.py", "import torch", "imports torch"),
        ("text/a.py", "def f():\n    import jax", "imports JAX"),
        ("training/a.py", "import tokenizers", "imports tokenizers when it is loaded"),
        ("extra/a.py", "import os", "belongs to no layer"),
    ],
)
def test_an_import_that_breaks_a_rule_is_found(tmp_path, file, line, expected):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(line + "\n")
    assert any(expected in said for said in violations(tmp_path))


def test_a_circle_of_layers_is_found(tmp_path):
    for name, other in (("checkpoint", "runtime"), ("runtime", "checkpoint")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(f"import jaxformer.{other}.a\n")
    assert any("circle" in said for said in violations(tmp_path))
