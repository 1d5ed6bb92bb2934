"""Imports go down only: from a layer of the package, or a room of the harness, to lower ones."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxformer
from experiments.harness import cli

PACKAGE = Path(jaxformer.__file__).parent
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
# A layer imports those before it alone.
LAYERS = "errors config optional_dependencies storage records ops nn decoding text training"
LAYERS += " distributed runtime checkpoint pretrained pipelines"
RANKS = {
    "jaxformer": {name: number for number, name in enumerate(LAYERS.split())},
    # Results and planning do not know each other.
    "experiments.harness": {"cli": 0, "runs": 1, "training": 2, "results": 3, "planning": 3},
}
DOOR = [[name] for name in cli.__all__]
# etils and tensorstore are parts of orbax.
REQUIRED = {"jax", "flax", "optax", "orbax", "etils", "tensorstore", "numpy", "jaxtyping"}
REQUIRED_BY_TEXT = {"numpy", "jaxtyping"}
NEVER_IMPORTED = {"experiments", "tests", "torch", "transformers"}


def imported_names(tree: ast.AST, *, on_load: bool = False) -> Iterator[str]:
    """The dotted name of everything that `tree` imports, anywhere or when it is loaded."""
    for node in ast.iter_child_nodes(tree):
        late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        late |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif not (late and on_load):
            yield from imported_names(node, on_load=on_load)


def other_packages(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"jaxformer"}


def violations(folder: Path, package: str) -> Iterator[str]:
    """A line for each import in `folder`, which holds the package of that name, against a rule."""
    ranks = RANKS[package]
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(folder)
        layer = where.parts[0].removesuffix(".py")
        if layer not in ranks:
            yield from [f"{where} belongs to no layer"] if layer != "__init__" else []
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        names = list(imported_names(tree))
        for name in names:
            inside = name.removeprefix(f"{package}.")
            other = inside.split(".")[0] if inside != name else ""
            ours = name.split(".")[0] == package.split(".")[0]
            if ours and other != layer and ranks.get(other, 99) >= ranks[layer]:
                yield f"{where} imports {name}, no layer below it"
        if package != "jaxformer":
            continue
        yield from (f"{where} imports {name} relatively" for name in names if name.startswith("."))
        yield from (f"{where} imports {x}" for x in other_packages(iter(names)) & NEVER_IMPORTED)
        allowed = REQUIRED_BY_TEXT if layer == "text" else REQUIRED
        for name in other_packages(imported_names(tree, on_load=True)) - allowed:
            yield f"{where} imports {name} when it is loaded"
        if layer == "text" and other_packages(iter(names)) & (REQUIRED - REQUIRED_BY_TEXT):
            yield f"{where} imports JAX"


def test_imports_of_the_package_and_of_the_harness_go_down_only():
    assert [*violations(PACKAGE, "jaxformer")] == []
    assert [*violations(EXPERIMENTS / "harness", "experiments.harness")] == []


@pytest.mark.parametrize(
    "file, line, expected",
    [
        ("nn/a.py", "from jaxformer.training import losses", "losses, no layer below"),
        ("ops/a.py", "def f():\n    from jaxformer.nn.models import X", "models.X, no layer below"),
        ("runtime/a.py", "import jaxformer.checkpoint.a", "checkpoint.a, no layer below"),
        ("nn/a.py", "from .blocks import Block", "relatively"),
        ("nn/a.py", "import torch", "imports torch"),
        ("text/a.py", "def f():\n    import jax", "imports JAX"),
        ("training/a.py", "import tokenizers", "imports tokenizers when it is loaded"),
        ("extra/a.py", "import os", "belongs to no layer"),
        ("runs/a.py", "def f():\n    from experiments.harness.training import a", "training.a, no"),
        ("results/a.py", "from experiments.harness import planning", "planning, no layer below"),
        ("training/a.py", "from experiments.translation import train", "translation.train, no"),
    ],
)
def test_an_import_that_breaks_a_rule_is_found(tmp_path, file, line, expected):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(line + "\n")
    package = "experiments.harness" if "experiments" in line else "jaxformer"
    assert any(expected in said for said in violations(tmp_path, package))


def test_everybody_else_imports_the_command_line_by_its_door():
    past = [
        f"{path} imports {name}"
        for path in sorted(EXPERIMENTS.rglob("*.py"))
        if not path.is_relative_to(EXPERIMENTS / "harness" / "cli")
        for name in imported_names(ast.parse(path.read_text("utf-8")))
        if name.startswith("experiments.harness.cli.") and name.split(".")[3:] not in DOOR
    ]
    assert past == []
