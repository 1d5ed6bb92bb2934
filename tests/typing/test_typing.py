"""Type checkers see real types: mistakes are reported where they are made, and only there.

Run with `-m types` (needs the extra `types`).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks

MISUSE = Path(__file__).with_name("misuse.py")
CHECKED = ("jaxformer", "experiments", str(MISUSE))

pytestmark = pytest.mark.types


def run(*command: str) -> str:
    """The output of a checker of this environment."""
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900).stdout


def misuses() -> list[tuple[str, int]]:
    """The file and the line of each mistake that is marked as one."""
    lines = MISUSE.read_text(encoding="utf-8").splitlines()
    return [(MISUSE.name, i) for i, line in enumerate(lines, 1) if line.endswith("# error")]


def test_pyright_reports_each_misuse_and_nothing_else(tmp_path):
    """Nothing in the package, in the experiments and in the code of the README."""
    example = tmp_path / "example.py"
    example.write_text("\n".join(block.code for block in blocks("README.md", "python")))
    options = ("--outputjson", "--pythonpath", sys.executable)
    report = json.loads(run("pyright", *options, *CHECKED, str(example)))
    assert report["summary"]["filesAnalyzed"] > 200
    errors = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    }
    assert sorted(errors) == misuses(), errors


def test_mypy_reports_each_misuse_and_nothing_else():
    """Nothing in the package and in the experiments."""
    report = run("mypy", *CHECKED)
    (checked,) = re.findall(r"checked (\d+) source files", report)
    assert int(checked) > 200
    errors = re.findall(r"^(?:.*/)?(\w+\.py):(\d+)(?::\d+)?: error", report, re.MULTILINE)
    assert sorted({(name, int(line)) for name, line in errors}) == misuses(), report[-3000:]
