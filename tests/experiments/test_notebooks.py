"""The notebooks: each is made of today's source, and its cells run."""

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from jaxformer.text.tokenizers import BOS, EOS, PAD, train_words

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for path in sorted((ROOT / "experiments/examples/notebooks").glob("*.py"))
    if path.read_text("utf-8").startswith("# %%")
]
NEED_TORCH = {"functional_and_pytorch"}

RIGHT = {
    "the small mouse loves a horse": "die kleine Maus liebt ein Pferd",
    "today a mouse can see the woman": "heute kann eine Maus die Frau sehen",
    "a big horse finds the dog": "ein großes Pferd findet den Hund",
    "a white child seeks the young man": "ein weißes Kind sucht den jungen Mann",
    "today a small bird hears the small dog": "heute hört ein kleiner Vogel den kleinen Hund",
    "a young child must paint a big dog": "ein junges Kind muss einen großen Hund malen",
}


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def images(notebook):
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_committed_notebook_has_the_cells_of_its_source_and_their_output(source):
    path = source.with_suffix(".ipynb")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert cells(notebook) == cells(jupytext.read(source))
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert images(notebook) > 0
    assert path.stat().st_size < 400_000
    assert "/home/" not in path.read_text("utf-8")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, marks=pytest.mark.peer if path.stem in NEED_TORCH else pytest.mark.slow)
        for path in SOURCES
    ],
    ids=lambda path: path.stem,
)
def test_the_source_of_a_notebook_runs(source):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "ignore::UserWarning", str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_toy_sentence_has_the_right_translation():
    pairs = dict(sentence_pairs(3_000, seed=0))
    assert len(pairs) == 3_000
    assert RIGHT.items() <= pairs.items()
    tokenizer = train_words([text for pair in pairs.items() for text in pair], 200)
    source, target = encode_pairs(list(pairs.items())[:7], tokenizer)
    assert (target[:, 0] == BOS).all()
    for ids in (source, target):
        assert ((ids == EOS).sum(axis=1) == 1).all()
        assert (ids[:, -1] == PAD).any() and (ids[:, -1] == EOS).any()
