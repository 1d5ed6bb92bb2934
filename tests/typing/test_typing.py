"""Type checkers see real types: mistakes are reported where they are made, and only there.

Run with `-m types` (needs the extra `types`).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISUSE = Path(__file__).with_name("misuse.py")

pytestmark = pytest.mark.types


def expected_lines() -> list[int]:
    lines = MISUSE.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# error")]


def run(*command: str) -> str:
    if command[0] == "pyright":
        command = (*command, "--pythonpath", sys.executable)
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    return done.stdout


def test_pyright_reports_each_misuse_and_nothing_else():
    report = json.loads(run("pyright", "--outputjson", str(MISUSE)))
    lines = [each["range"]["start"]["line"] + 1 for each in report["generalDiagnostics"]]
    assert sorted(set(lines)) == expected_lines()


def test_mypy_reports_each_misuse_and_nothing_else():
    report = run("mypy", str(MISUSE))
    lines = re.findall(r"misuse\.py:(\d+): error", report)
    assert sorted(set(map(int, lines))) == expected_lines()


def readme_example(folder: Path) -> Path:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = folder / "example.py"
    path.write_text("\n".join(blocks))
    return path


def test_the_readme_example_has_no_type_error(tmp_path):
    report = json.loads(run("pyright", "--outputjson", str(readme_example(tmp_path))))
    assert report["summary"]["filesAnalyzed"] == 1
    assert [each["message"] for each in report["generalDiagnostics"]] == []


@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_package_and_experiments_have_no_type_error(checker):
    report = run(checker, *(() if checker == "pyright" else ("jaxformer", "experiments")))
    assert re.search(r"^(0 errors|Success: no issues found)", report, re.MULTILINE), report[-3000:]
