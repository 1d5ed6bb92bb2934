"""The notebooks: each is made of today's source, and its cells run."""

import nbformat
import pytest

from experiments.examples.notebooks import execute
from experiments.examples.notebooks.execute import ExecuteOptions
from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.tokenizers import BOS, EOS, PAD, train_words

SOURCES = execute.sources()
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
    assert cells(notebook) == cells(execute.read(source))
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
def test_each_cell_runs_in_two_minutes(source, tmp_path):
    execute.main(ExecuteOptions((source.stem,), timeout=120, output=str(tmp_path)))
    notebook = nbformat.read(tmp_path / f"{source.stem}.ipynb", as_version=4)
    committed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert images(notebook) == images(committed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the command takes percent scripts from."""
    monkeypatch.setattr(execute, "FOLDER", tmp_path)
    (tmp_path / "module.py").write_text('"""No notebook."""\n')
    (tmp_path / "small.py").write_text("# %% [markdown]\n# Text\n\n# %%\nprint(1 + 1)\n")
    return tmp_path


def test_a_percent_script_becomes_a_notebook_and_the_same_one_again(folder, capsys):
    execute.main(ExecuteOptions())
    assert "small: 2 cells\n  2/2" in capsys.readouterr().out
    assert [path.name for path in folder.glob("*.ipynb")] == ["small.ipynb"]
    first = (folder / "small.ipynb").read_text()
    notebook = nbformat.reads(first, as_version=4)
    assert cells(notebook) == [("markdown", "Text"), ("code", "print(1 + 1)")]
    assert notebook.cells[1].outputs[0].text == "2\n"
    execute.main(ExecuteOptions())
    assert (folder / "small.ipynb").read_text() == first


def test_a_cell_that_fails_is_named_and_nothing_is_written(folder):
    (folder / "small.py").write_text("# %%\n1 + 1\n# %%\nraise ValueError('too small')\n")
    with pytest.raises(DataError, match="cell 2 of small failed: ValueError: too small"):
        execute.main(ExecuteOptions())
    assert not (folder / "small.ipynb").exists()


def test_a_cell_that_takes_too_long_is_named(folder):
    (folder / "small.py").write_text("# %%\nimport time\n\ntime.sleep(60)\n")
    with pytest.raises(DataError, match="cell 1 of small took more than 1 s: shorten it"):
        execute.main(ExecuteOptions(timeout=1))


def test_an_unknown_notebook_is_refused(folder):
    with pytest.raises(ConfigError, match="no notebook 'large': choose from small"):
        execute.main(ExecuteOptions(("large",)))


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
