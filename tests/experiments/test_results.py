"""Every reported number in a table has a line that says where it comes from."""

import dataclasses
import json
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
        if path.with_name(results.RUNS_FILE).exists():
            assert results.read(path.with_name(results.RUNS_FILE), results.TrainedRun)
    path = tmp_path / results.FILE
    path.write_text('{"table": "a", "system": "b", "metric": "c", "score": "high"}\n')
    with pytest.raises(DataError, match='results.jsonl:1: score is "high", but must be float'):
        results.read(path, results.Result)


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
    bleu, exact, again = results.read(tmp_path / "translation" / results.FILE, results.Result)
    assert again == dataclasses.replace(bleu, system="again")
    assert bleu.seeds == [0, 1] and bleu.score == sum(bleu.scores) / 2 and bleu.interval > 0
    assert bleu.commit == "ab12, changed" and bleu.versions == {"python": "3.11.7", "jax": "0.10.2"}
    assert bleu.device == "cpu:cpu, 2 CPU cores" and bleu.command == "python -m x"
    assert bleu.seconds == 83 and bleu.date == "2026-11-22" and "tok:13a" in bleu.signature
    assert len(bleu.config_sha256) == len(bleu.text_sha256) == 64 and exact.signature is None
    runs = results.read(tmp_path / "translation" / results.RUNS_FILE, results.TrainedRun)
    assert [run.seed for run in runs] == [0, 1]
    assert runs[0].config_sha256 == runs[1].config_sha256 == bleu.config_sha256
    assert runs[1].config["model.width"] == 7 and runs[1].commit == bleu.commit
    assert runs[1].curve["validation_bleu"] == [[97, 31.5]]
    assert runs[1].curve["loss"] == [[x, float(f"{1 / x:.5g}")] for x in range(1, 98, 2)]
    row = f"| toy | bleu | 2 | {bleu.score:.0f} ± {bleu.interval:.0f} |"
    assert row in page.read_text() and page.read_text().endswith("after\n")
    page.write_text(page.read_text().replace("toy", "another"))
    with pytest.raises(DataError, match="has a table that its results do not make: run python -m"):
        results.main(dataclasses.replace(options, check=True))
    capsys.readouterr()


def test_a_run_on_another_device_gets_a_line_and_leaves_the_others_as_they_are(tmp_path):
    one = results.TrainedRun(
        seed=3, curve={"loss": [[5, 1.5]]}, config={}, config_sha256="ab", device="cpu:cpu"
    )
    path = tmp_path / results.RUNS_FILE
    results.append(path, [one])
    written = path.read_text()  # with 5 and not 5.0, which reading makes of it
    results.append(path, [dataclasses.replace(one, device="gpu:NVIDIA H200")])
    assert path.read_text().startswith(written)
    lines = results.read(path, results.TrainedRun)
    assert [line.device for line in lines] == ["cpu:cpu", "gpu:NVIDIA H200"]
    results.append(path, [dataclasses.replace(one, curve={"loss": [[5, 1.25]]})])
    assert [line.curve["loss"][0][1] for line in results.read(path, results.TrainedRun)] == [
        1.25,
        1.5,
    ]


def test_a_figure_has_the_curves_of_the_runs_behind_the_results_of_a_table(
    tmp_path, monkeypatch, capsys
):
    curve = {"loss": [[5, 2.5]], "validation_bleu": [[5, 17.5], [7, 19.0]]}
    run = results.TrainedRun(
        seed=3, curve=curve, config={}, config_sha256="ab", device="cpu:cpu, 2 CPU cores"
    )
    runs = [
        run,
        dataclasses.replace(run, seed=5, device="cpu:cpu, 1 CPU cores"),
        dataclasses.replace(run, seed=11),
        dataclasses.replace(run, config_sha256="cd"),
        dataclasses.replace(run, device="gpu:NVIDIA H200, 2 CPU cores"),
        dataclasses.replace(run, seed=7, curve={"loss": [[5, 2.5]]}),
    ]
    result = results.Result(
        table="own",
        system="toy",
        metric="bleu",
        score=18.0,
        seeds=[3, 5, 7],
        config_sha256="ab",
        device="cpu:cpu, 1 CPU cores",
    )
    other = dataclasses.replace(result, table="other", metric="chrf")
    assert results.curves_of([result, other], runs) == {
        "validation_bleu": {"toy": [((5, 7), (17.5, 19.0))] * 2}
    }
    results.append(tmp_path / results.FILE, [result, other])
    results.append(tmp_path / results.RUNS_FILE, runs)
    figure = tmp_path / "own.svg"
    options = results.ResultsOptions(table="own", figure=str(figure))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    results.main(dataclasses.replace(options, check=True))
    assert not figure.exists()
    results.main(options)
    assert "toy (2 seeds)" in figure.read_text() and "own.svg" in capsys.readouterr().out
    for wrong in ({"table": "other"}, {"metrics": ("chrf",)}):
        with pytest.raises(DataError, match="runs.jsonl has no curve of a result of the table"):
            results.main(dataclasses.replace(options, **wrong))


def test_the_time_of_a_run_is_that_of_all_its_starts(tmp_path):
    text = sentences(3, seed=1)
    run = write_run(tmp_path / "translation" / "resumed", text, text)
    environment = {"time": "2026-11-22T10:00:00+00:00", "earlier": [{"seconds": 40.0}]}
    environment |= {"finished": "2026-11-22T10:00:07+00:00"}
    (run / "env.json").write_text(json.dumps(environment))
    assert results.trained_run(run).seconds == 47
    (run / "env.json").write_text(json.dumps(environment | {"earlier": [{}]}))
    assert results.trained_run(run).seconds is None
