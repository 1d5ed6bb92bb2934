"""The rooms of experiments/harness import lower rooms only, and the command line by its door."""

import ast
from pathlib import Path

import pytest

from experiments.harness import cli
from tests.test_layering import imported_names

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "experiments" / "harness"
DOOR = [[name] for name in cli.__all__]
RANKS = {"cli": 0, "runs": 1, "training": 2, "results": 3, "planning": 3}
"""A room imports rooms of a lower rank; results and planning do not know each other."""


def violations(harness: Path) -> list[str]:
    """A line for each import in `harness` of a room that is not below."""
    wrong = []
    for path in sorted(harness.rglob("*.py")):
        where = path.relative_to(harness)
        if where.parts[0] not in RANKS:
            wrong += [f"{where} is in no room"] if str(where) != "__init__.py" else []
            continue
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            package, *names = name.split(".")
            room = names[1] if names[:1] == ["harness"] else ""
            allowed = room == where.parts[0] or RANKS.get(room, 9) < RANKS[where.parts[0]]
            if package == "experiments" and not allowed:
                wrong.append(f"{where} imports {name}")
    return wrong


def test_everybody_else_imports_the_command_line_by_its_door():
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "experiments").rglob("*.py"))}
    past = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, text in texts.items()
        if not path.is_relative_to(HARNESS / "cli") and "harness.cli" in text
        for name in imported_names(ast.parse(text))
        if name.startswith("experiments.harness.cli.") and name.split(".")[3:] not in DOOR
    ]
    assert past == []


def test_rooms_import_lower_rooms_only():
    assert violations(HARNESS) == []


@pytest.mark.parametrize(
    "file, line, said",
    [
        ("runs/a.py", "def f():\n    from experiments.harness.training import build", "training.b"),
        ("results/a.py", "from experiments.harness import planning", "planning"),
        ("training/a.py", "from experiments.translation import train", "translation.train"),
        ("extra.py", "import os", "extra.py is in no room"),
    ],
)
def test_an_import_of_a_room_that_is_not_below_is_noticed(tmp_path, file, line, said):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert said in " ".join(violations(tmp_path))
