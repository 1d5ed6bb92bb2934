"""Every reported number in a table has a line that says where it comes from."""

import dataclasses
import json
import re
import shutil

import pytest

from experiments import results
from jaxformer.errors import DataError
from tests.experiments.finished_runs import sentences, worse, write_run

PAGES = results.pages(results.ROOT)
PAGE = results.ROOT / "language_modelling" / "README.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A copy of a page of ours with its results."""
    folder = tmp_path_factory.mktemp("page")
    for path in (PAGE, PAGE.with_name(results.FILE)):
        shutil.copy(path, folder)
    return folder / PAGE.name


def test_the_tables_of_the_pages_are_those_that_their_results_make():
    assert {path.parent.name for path in PAGES} >= {"translation", "language_modelling"}
    results.main(results.ResultsOptions(check=True))


def peers(row, other):
    """A row of the table of peers."""
    return "peers", (row, "jaxformer"), (row, other)


README = {  # the beginning of a row: its table, then system and metric of ours and of the other
    "Multi30k": ("quality", ("multi30k_lower, beam 5", "lowercased.bleu"), None),
    "Shakespeare": ("shakespeare", ("jaxformer", "loss"), ("PyTorch", "loss")),
    "the same": ("changes", ("and rows of 256, 3 a batch, 798,928", "loss"), None),
    "WikiText-2": ("quality", ("wikitext2, --stride 64", "word_perplexity"), None),
    "Python's": ("quality", ("python_stdlib", "bits_per_byte"), None),
    "training step of a": peers("training step, nanoGPT of 10.6 M, ms", "PyTorch, eager"),
    "training step of nano": peers("training step, nanoGPT of 0.8 M, ms", "torch.compile"),
    "generation": peers("240 tokens after 16, 1 text, ms", "PyTorch, eager"),
    "beam search, base size, f": peers("beam search of 32 texts, float32, tokens/s", "CTranslate2"),
    "beam search, base size, i": peers("beam search of 32 texts, int8, tokens/s", "CTranslate2"),
    "attention": peers("attention, 8,192 tokens, ms", "PyTorch, eager"),
}


def test_each_number_of_the_readme_is_that_of_a_line_and_no_other_system_is_faster():
    lines = [line for path in PAGES for line in results.read(path.with_name(results.FILE))]
    text = (results.ROOT.parent / "README.md").read_text().partition("## Results")[2]
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    rows = [row for row in rows if any(row[0].startswith(name) for name in README)]
    assert len(rows) == len(README)
    for first, *cells in rows:
        ((table, *named),) = (row for name, row in README.items() if first.startswith(name))
        scores = {(x.system, x.metric): x for x in lines if x.table == table}
        for cell, name in zip(cells, named, strict=True):
            if name is None:
                assert cell == "-" or "published" in cell
                continue
            number, *interval = re.findall(r"\d[\d,.]*", cell.partition(" (")[0])
            digits = len(number.partition(".")[2])
            assert f"{scores[name].score:,.{digits}f}" == number, first
            assert not interval or f"{scores[name].interval:.{digits}f}" == interval[0], first
        if table == "peers":
            (system, _), best = named[1], max if named[1][0].endswith("/s") else min
            others = [x for (s, m), x in scores.items() if s == system and m != "jaxformer"]
            assert scores[named[1]].score == best(x.score for x in others), first


def test_a_number_without_a_line_is_found(page):
    text = page.read_text()
    assert results.with_tables(page) == text
    page.write_text(text.replace("1.457", "1.456"))
    assert results.with_tables(page) == text != page.read_text()
    page.write_text(text.replace("results: quality", "results: better"))
    with pytest.raises(DataError, match="results.jsonl has no line of the table 'better'"):
        results.with_tables(page)


def test_a_line_names_every_field_and_a_wrong_one_is_named(tmp_path):
    names = {field.name for field in dataclasses.fields(results.Result)}
    for path in PAGES:
        for line in path.with_name(results.FILE).read_text().splitlines():
            assert json.loads(line).keys() == names
    path = tmp_path / results.FILE
    path.write_text('{"table": "a", "system": "b", "metric": "c", "score": "high"}\n')
    with pytest.raises(DataError, match='results.jsonl:1: score is "high", but must be float'):
        results.read(path)


def test_a_recorded_run_has_all_that_is_known_of_it(tmp_path, monkeypatch, capsys):
    text = sentences(29, seed=1)
    environment = {"python": "3.11.7", "jax": "0.10.2", "command": "python -m x", "cpus": 2}
    environment |= {"devices": ["cpu:cpu"], "git_commit": "ab12", "git_changed": True}
    environment |= {"time": "2026-11-22T10:00:00+00:00", "earlier": []}
    environment |= {"finished": "2026-11-22T10:01:23+00:00"}
    for seed in (0, 1):
        run = write_run(
            tmp_path / "translation" / f"s{seed}", worse(text, 0.3, seed), text, seed=seed
        )
        (run / "env.json").write_text(json.dumps(environment))
        points = [{"step": step, "loss": 1 / step} for step in range(1, 98)]
        points += [{"step": 97, "validation_bleu": 31.5}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in points))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    page = tmp_path / "translation" / "README.md"
    page.write_text("before\n<!-- results: own -->\n<!-- end -->\nafter\n")
    options = results.ResultsOptions(
        runs=(str(tmp_path / "translation"),), table="own", system="toy", metrics=("bleu", "exact")
    )
    for _ in range(2):  # recorded again, a line takes the place of the old one
        results.main(options)
    results.main(dataclasses.replace(options, system="again", metrics=("bleu",)))
    bleu, exact, again = results.read(tmp_path / "translation" / results.FILE)
    assert again == dataclasses.replace(bleu, system="again")
    assert bleu.seeds == [0, 1] and bleu.score == sum(bleu.scores) / 2 and bleu.interval > 0
    assert bleu.commit == "ab12, changed" and bleu.versions == {"python": "3.11.7", "jax": "0.10.2"}
    assert bleu.device == "cpu:cpu, 2 CPU cores" and bleu.command == "python -m x"
    assert bleu.seconds == 83 and bleu.date == "2026-11-22" and "tok:13a" in bleu.signature
    assert len(bleu.config_sha256) == len(bleu.text_sha256) == 64 and exact.signature is None
    row = f"| toy | bleu | 2 | {bleu.score:.0f} ± {bleu.interval:.0f} |"
    assert row in page.read_text() and page.read_text().endswith("after\n")
    page.write_text(page.read_text().replace("toy", "another"))
    with pytest.raises(DataError, match="has a table that its results do not make: run python -m"):
        results.main(dataclasses.replace(options, check=True))
    capsys.readouterr()


def test_a_line_whose_command_is_gone_names_the_commit_that_has_it():
    known = results.Result(table="own", system="toy", metric="bleu", score=18.25, seeds=[])
    commands = {
        "python -m experiments.results": "toy",
        "python -m experiments.repeat quality": "toy (with ab12cde)",
        "python -m experiments.plan translation --programs decode": "toy (with ab12cde)",
        "python -m experiments.translation.train --training.r_drop 3.0": "toy (with ab12cde)",
        "python -m experiments.sweep --training.model experiments.examples.lstm:A": (
            "toy (with ab12cde)"
        ),
        "python -m experiments.sweep --cells experiments.translation.variants:a": "toy",
        "GPT-3, table 2.1": "toy",
    }
    for command, shown in commands.items():
        line = dataclasses.replace(known, command=command, commit="ab12cdef0, changed")
        assert results.table_of([line]).rows[0][0] == shown, command
        scored = dataclasses.replace(line, seeds=[2, 3], commit=None)
        assert results.table_of([scored]).rows[0][0] == shown.replace("ab12cde", "947ba07")


def test_the_time_of_a_run_is_that_of_all_its_starts(tmp_path):
    text = sentences(3, seed=1)
    run = write_run(tmp_path / "translation" / "resumed", text, text)
    environment = {"time": "2026-11-22T10:00:00+00:00", "earlier": [{"seconds": 40.0}]}
    environment |= {"finished": "2026-11-22T10:00:07+00:00"}
    (run / "env.json").write_text(json.dumps(environment))
    assert results.results_of([run], "own")[0].seconds == 47
    (run / "env.json").write_text(json.dumps(environment | {"earlier": [{}]}))
    assert results.results_of([run], "own")[0].seconds is None
