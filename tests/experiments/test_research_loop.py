"""The loop that is meant to be changed: it resumes to the bit, and trains two models in turn."""

import ast
import json
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples import research_loop
from tests.documents import blocks

pytestmark = pytest.mark.long

TEXT = "sun moon star rain. " * 101
SIZES = "--steps 7 --save_every 3 --batch_size 5 --length 19 --d_model 12 --layers 1".split()


def edits_of(diff: str) -> dict[str, str]:
    """The edits of a diff without context, text -> text: hunks are apart by an empty line."""
    edits = {}
    for hunk in diff.split("\n\n"):
        lines = hunk.splitlines()
        before = [line[1:] + "\n" for line in lines if line.startswith("-")]
        after = [line[1:] + "\n" for line in lines if line.startswith("+")]
        assert len(before) + len(after) == len(lines), hunk
        edits["".join(before)] = "".join(after)
    return edits


(_GUIDE,) = blocks("experiments/guides/own_parts.md", "diff")
TWO_MODELS = edits_of(_GUIDE.code)
"""The change for two models in turn, as the guide shows it."""


def copy(edits: dict[str, str]) -> ModuleType:
    """The example with `edits`, each of which it holds once."""
    text = Path(research_loop.__file__).read_text(encoding="utf-8")
    for before, after in edits.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    module = ModuleType("copied_loop")
    exec(compile(text, "copied_loop", "exec"), module.__dict__)
    return module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def interrupted(module, args, monkeypatch, at):
    """Runs `module` until the batch of the step `at` is asked for, as if it were killed there."""
    batch = jf.Stream.batch

    def killed(stream, step, *more):
        if step == at:
            raise KeyboardInterrupt
        return batch(stream, step, *more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jf.Stream, "batch", killed)
        module.main(args)


@pytest.mark.parametrize("edits", [{}, TWO_MODELS], ids=["one model", "two models in turn"])
def test_a_loop_that_was_killed_goes_on_to_the_bit(edits, text, tmp_path, monkeypatch, capsys):
    module = copy(edits)
    whole, parts = ([text, "--folder", str(tmp_path / name), *SIZES] for name in ("one", "two"))
    expected = module.main(whole)
    first = capsys.readouterr().out
    interrupted(module, parts, monkeypatch, at=5)
    state = module.main(parts)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    logs = [(tmp_path / name / "losses.jsonl").read_text() for name in ("one", "two")]
    assert logs[0] == logs[1]
    assert [json.loads(line)["step"] for line in logs[0].splitlines()] == [3, 6, 7]
    again = capsys.readouterr().out
    assert again.splitlines()[-1] == first.splitlines()[-1], "the sample"


def test_two_models_in_turn_are_those_that_each_learns_from_every_other_batch(text, tmp_path):
    args = [text, "--folder", str(tmp_path / "run"), *SIZES, "--dropout_rate", "0"]
    state = copy(TWO_MODELS).main(args)
    counts = {name: int(x["opt_state"][1][0].count) for name, x in state.items()}
    assert counts == {"small": 4, "large": 3}
    depths = {
        name: sum(key.startswith("blocks") for key in x["params"]["decoder"])
        for name, x in state.items()
    }
    assert depths == {"small": 1, "large": 2}


def test_a_text_is_learned(text, tmp_path):
    args = [text, "--folder", str(tmp_path / "run"), *SIZES, "--steps", "60", "--save_every", "60"]
    research_loop.main([*args, "--d_model", "24", "--learning_rate", "1e-2"])
    (line,) = map(json.loads, (tmp_path / "run" / "losses.jsonl").read_text().splitlines())
    assert line["held_out"] < 0.5 * np.log(11), "a guess among 11 characters is worse"


def test_other_batches_are_refused(text, tmp_path):
    args = [text, "--folder", str(tmp_path / "run"), *SIZES]
    research_loop.main(args)
    with pytest.raises(AssertionError, match="other batches"):
        research_loop.main([*args, "--seed", "1"])


def test_it_needs_no_other_module_of_the_experiments():
    tree = ast.parse(Path(research_loop.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any((node.module or "").startswith("experiments") for node in imports)
