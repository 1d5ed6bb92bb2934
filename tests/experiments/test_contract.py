"""The promises of every experiment, also of the one in the examples."""

import json

import pytest

from experiments import runs
from experiments.harness.runs.run_folder import read_result
from experiments.language_modelling import evaluate as evaluate_language
from experiments.language_modelling import prepare as prepare_language
from experiments.translation import evaluate as evaluate_translation
from experiments.translation import prepare as prepare_translation
from jaxformer.checkpoint import Checkpoints, manifest
from tests.experiments.commands import bytes_of, call, metrics_of, refused
from tests.experiments.tiny_runs import changed
from tests.experiments.trained_runs import copied

FILES = "config.json env.json metrics.jsonl checkpoints scores.json weights.json tensorboard"
STEPS = [3, 6, 7]
"""The steps that a finished run keeps."""


@pytest.fixture(scope="module", params=["translation_run", "causal_run", "reverse_run"])
def run(request):
    """A finished run of each experiment."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=["translation_run", "causal_run"])
def text_run(request):
    """A finished run of each experiment that reads text."""
    return request.getfixturevalue(request.param)


def other(run, folder, **changes):
    """The settings of `run` with `changes`, for a run in another folder."""
    return changed(run.config, runs=str(folder), **changes)


def checkpoints_of(folder):
    return Checkpoints(folder / "checkpoints")


def snapshot(folder):
    """Every file of a run but the log of its surroundings."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "env.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_leaves_its_settings_metrics_weights_and_scores(run):
    assert {path.name for path in run.folder.iterdir()} >= set(FILES.split())
    assert checkpoints_of(run.folder).steps() == STEPS
    assert [line["step"] for line in metrics_of(run.folder, "loss")] == [1, 2, 3, 4, 5, 6, 7]
    losses = {x["step"]: x["validation_loss"] for x in metrics_of(run.folder, "validation_loss")}
    assert list(losses) == [3, 6] and losses[6] < losses[3]
    result = read_result(run.folder)
    stored = json.loads((run.folder / "scores.json").read_text())
    assert result.scores.items() <= stored.items()
    assert len(result.scores["text_sha256"]) == 64 and result.steps in ([6, 7], [3], [6])
    assert f"{run.folder}\n7 steps on 1 x cpu, evaluated every 3, saved every 3" in run.out


def test_a_run_stopped_by_a_signal_and_resumed_is_the_uninterrupted_one_to_the_bit(run, tmp_path):
    config = other(run, tmp_path)
    logger = "tests.experiments.trained_runs:StopAt4"
    first = call(run.train, changed(config, training__loggers=(logger,)))
    assert first.code == 143 and "SIGTERM: saving after" in first.err
    folder = tmp_path / run.folder.relative_to(run.text / "runs")
    assert (folder / "closed").exists(), "a logger is closed whatever ends the run"
    stopped, whole = checkpoints_of(folder), checkpoints_of(run.folder)
    regular = [(step, manifest.read(folder / "checkpoints" / f"{step}").regular) for step in (3, 5)]
    assert stopped.steps() == [3, 5] and regular == [(3, True), (5, False)]
    second = call(run.train, config)
    assert second.code == 0 and "from step 5 to 7" in second.out
    assert stopped.steps() == whole.steps() == STEPS and stopped.best_step() == whole.best_step()
    for step in (6, 7):
        assert bytes_of(folder, step) == bytes_of(run.folder, step)
    assert metrics_of(folder) == metrics_of(run.folder)
    results = ["scores.json", "weights.json"]
    results += [str(path.relative_to(run.folder)) for path in run.folder.glob("samples/*")]
    for name in results:
        assert (folder / name).read_bytes() == (run.folder / name).read_bytes()


def test_a_run_continued_under_another_name_is_to_the_bit_the_one_that_went_on(
    text_run, tmp_path, capsys
):
    run = text_run
    config = other(run, tmp_path, name="child", continue_from=f"{run.folder}@3")
    done = call(run.train, config)
    assert done.code == 0 and "from step 3 to 7" in done.out
    child = tmp_path / run.train.train.EXPERIMENT / "child"
    assert bytes_of(child, 7) == bytes_of(run.folder, 7)
    assert metrics_of(child) == metrics_of(run.folder)[3:], "it evaluates its first state again"
    runs.main(["list", str(tmp_path)])
    assert f"{run.folder}@3" in capsys.readouterr().out


def test_another_seed_is_another_run_and_one_that_gets_no_better_ends_early(run, tmp_path):
    rule = {"patience": 1, "early_stopping_metric": "validation_loss", "early_stopping_mode": "max"}
    rule = {f"training__{name}": value for name, value in rule.items()}
    assert call(run.train, other(run, tmp_path, training__seed=1, **rule)).code == 0
    folder = tmp_path / run.folder.relative_to(run.text / "runs")
    assert checkpoints_of(folder).steps() == [3, 6], "the loss falls, but more was wanted"
    assert bytes_of(folder, 6) != bytes_of(run.folder, 6)
    assert metrics_of(folder)[0]["loss"] != metrics_of(run.folder)[0]["loss"]


EVALUATE = {"translation": evaluate_translation, "language_modelling": evaluate_language}
PREPARE = {"translation": prepare_translation, "language_modelling": prepare_language}


def test_evaluating_a_run_prints_its_scores(text_run):
    command = EVALUATE[text_run.train.train.EXPERIMENT]
    done = call(command, {"--run": text_run.folder})
    assert done.code == 0, done.err
    printed = json.loads(done.out.splitlines()[-1])
    stored = read_result(text_run.folder).scores
    stored.pop("text")
    assert {name: printed[name] for name in stored} == stored


def test_a_run_whose_training_text_has_changed_is_refused_and_untouched(text_run, tmp_path):
    run = copied(text_run, tmp_path / "copy")
    before = snapshot(run.folder)
    path = run.text / ("train.target" if (run.text / "train.target").exists() else "b.txt")
    path.write_bytes(path.read_bytes().replace(b"sun", b"fog"))
    done = call(PREPARE[run.train.train.EXPERIMENT], run.config)
    refused(done, 66, "tiny was trained on other text than this")
    assert snapshot(run.folder) == before
