"""The street of modules: every import goes down, and what is optional is asked for late."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxformer

PACKAGE = Path(jaxformer.__file__).parent

FLOORS = {
    "config": 0,
    "extras": 0,
    "processors": 0,
    "positions": 1,
    "masks": 1,
    "kernels": 1,
    "dropout": 1,
    "cache": 1,
    "products": 1,
    "losses": 1,
    "attention": 2,
    "layers": 2,
    "blocks": 2,
    "models": 3,
    "heads": 3,
    "int8": 3,
    "tokenizers": 4,
    "data": 4,
    "metrics": 4,
    "optimizer": 5,
    "training": 5,
    "parallel": 6,
    "runtime": 6,
    "checkpoint": 6,
    "decoding": 7,
    "pretrained": 7,
    "generation": 7,
    "plots": 7,
}

NEIGHBOURS = {
    "kernels": {"dropout", "masks"},
    "cache": {"masks"},
    "losses": {"dropout", "products"},
    "attention": {"layers"},
    "blocks": {"attention", "layers"},
    "heads": {"models"},
    "int8": {"models"},
    "data": {"tokenizers"},
    "metrics": {"tokenizers"},
    "training": {"optimizer"},
    "generation": {"decoding", "pretrained"},
    "plots": {"generation"},
}

LIBRARIES = {"jax", "flax", "optax", "orbax", "numpy"}
TEXT_LIBRARIES = {"numpy"}
STRANGERS = {"experiments", "tests", "torch", "transformers"}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The name on the street: "kernels" for jaxformer/kernels/xla.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def neighbours(path: Path) -> set[str]:
    """The other jaxformer modules that the file imports from."""
    names = {name.split(".")[1] for name in imports(parsed(path)) if name.startswith("jaxformer.")}
    return names - {module_of(path)}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_with_module(tree: ast.AST) -> Iterator[str]:
    """Like `imports`, without the bodies of functions and of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        elif not late and not checking:
            yield from imports_with_module(node)


def outsiders(names: Iterator[str]) -> set[str]:
    packages = {name.split(".")[0] for name in names}
    return packages - set(sys.stdlib_module_names) - {"jaxformer"}


def test_every_module_has_a_floor():
    assert {module_of(path) for path in FILES} - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    module = module_of(path)
    if module == "__init__":
        assert neighbours(path) == set()
        return
    allowed = {name for name, floor in FLOORS.items() if floor < FLOORS[module]}
    assert neighbours(path) <= allowed | NEIGHBOURS.get(module, set())


def test_no_imports_run_in_a_circle():
    graph = {}
    for path in FILES:
        graph.setdefault(module_of(path), set()).update(neighbours(path))
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_what_is_always_installed_is_imported_with_the_module(path):
    names = imports_with_module(parsed(path))
    text = FLOORS.get(module_of(path)) == 4
    assert outsiders(names) <= (TEXT_LIBRARIES if text else LIBRARIES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_the_experiments_or_a_peer(path):
    assert outsiders(imports(parsed(path))) & STRANGERS == set()


@pytest.mark.parametrize("name", [name for name, floor in FLOORS.items() if floor == 4])
def test_text_never_imports_jax(name):
    files = [path for path in FILES if module_of(path) == name]
    for path in files:
        assert outsiders(imports(parsed(path))) & (LIBRARIES - TEXT_LIBRARIES) == set()


def test_an_upward_import_is_noticed():
    tree = ast.parse("from jaxformer.models import DecoderOnly\nimport jaxformer.training")
    assert {name.split(".")[1] for name in imports(tree)} == {"models", "training"}


def test_what_is_imported_inside_a_function_is_not_imported_with_the_module():
    lines = ["if TYPE_CHECKING:", "    import a", "def f():", "    import b"]
    tree = ast.parse("\n".join([*lines, "if True:", "    import c.d", "from e import f"]))
    assert list(imports_with_module(tree)) == ["c.d", "e.f"]
