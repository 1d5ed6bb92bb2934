"""The experiment that stands by itself is swept, planned and named like the others.

What it promises of its runs is in test_contract.py.
"""

from pathlib import Path

import numpy as np
import pytest

from experiments import plan, registry, runs, sweep
from experiments.examples import own_experiment
from experiments.harness import cli
from experiments.harness.runs.run_folder import read_result
from jaxformer.errors import ConfigError
from tests.experiments.commands import call
from tests.experiments.tiny_runs import changed

PATH = "experiments.examples.own_experiment"


@pytest.mark.long
def test_it_is_swept_and_compared_by_its_module(reverse_run, tmp_path, capsys):
    words = [PATH, "--config", str(reverse_run.folder), "--runs", str(tmp_path)]
    words += ["--name", "seeds", "--seeds", "2"]
    words += ["--training.log_every", "0", "--training.evaluate_every", "0"]
    sweep.main(words)
    said = capsys.readouterr().out
    assert "2 of 2 cells are finished" in said
    table = said[said.index("cells are finished") :]
    assert "loss" in table and "unchanged" in table
    folders = Path(tmp_path, "sweeps", "seeds", "reverse").iterdir()
    assert len({read_result(folder).scores["loss"] for folder in folders}) == 2


@pytest.mark.long
def test_it_is_planned_and_shown_on_a_page_by_its_path(reverse_run, tmp_path):
    words = [PATH, "--config", str(reverse_run.folder), "--target", "v5e", "--strategy", "single"]
    done = call(plan, words)
    assert done.code == 0, done.err
    assert "a step of 130 tokens on 1 x v5e" in done.out and "JAX may use on v5e: fits" in done.out
    page = tmp_path / "page.html"
    words = ["page", str(reverse_run.folder), "--output", str(page)]
    runs.main(words)
    assert "sequence and its reverse" not in page.read_text()
    runs.main([*words, "--experiment", PATH])
    assert "sequence and its reverse" in page.read_text()


def test_an_experiment_is_found_by_its_path_and_an_unknown_one_is_refused():
    assert registry.find(PATH) is own_experiment
    assert registry.find("translation").EXPERIMENT == "translation"
    with pytest.raises(ConfigError, match="experiment='forward'"):
        registry.find("forward")
    with pytest.raises(ConfigError, match="'nowhere'"):
        registry.find("nowhere.train")
    with pytest.raises(ConfigError, match="experiments.runs .*EXPERIMENT"):
        registry.find("experiments.runs")
    with pytest.raises(ConfigError, match="`planned`"):
        registry.planned("finetuning")


def test_it_has_options_of_its_own_and_none_of_another_task(capsys):
    config = cli.parse(own_experiment.PRESETS, ["--data.length", "7"])
    assert own_experiment.held_out(config).batch(0).tokens.shape == (64, 15)
    for option in ("--data.seq_len", "--data.train", "--data.batches", "--objective", "--prompts"):
        with pytest.raises(SystemExit) as end:
            cli.parse(own_experiment.PRESETS, [option, "7"])
        assert end.value.code == 2 and option in capsys.readouterr().err


def test_its_batches_are_digits_and_their_reverse_of_which_the_second_half_counts():
    batches = own_experiment.Sequences(length=3, batch_size=5, seed=2)
    batch = batches.batch(7, lambda size: np.array([4, 1]))
    whole = batches.batch(7)
    np.testing.assert_array_equal(batch.tokens, whole.tokens[[4, 1]])
    np.testing.assert_array_equal(batch.tokens[:, :3], batch.tokens[:, :3:-1])
    assert (batch.tokens[:, 3] == own_experiment.SEPARATOR).all()
    np.testing.assert_array_equal(batch.loss_mask, [[False] * 3 + [True] * 3] * 2)
    assert batches.fingerprint != batches._replace(length=5).fingerprint


@pytest.mark.slow
def test_it_learns_to_reverse(tmp_path):
    preset = next(iter(own_experiment.PRESETS.values()))
    config = changed(preset, runs=str(tmp_path), training__evaluate_every=0)
    result = own_experiment.train(config)
    assert result.scores["loss"] < 0.1, "a guess is worth log 7 = 1.95"


def doubled_loss(evaluation):
    """A metric of the user's."""
    assert evaluation.text == own_experiment.held_out(evaluation.loaded.config)
    return {"doubled": 2 * evaluation.scores["loss"]}


@pytest.mark.long
def test_its_evaluations_have_the_metrics_of_the_user(tmp_path):
    config = changed(
        own_experiment.PRESETS["reverse"],
        runs=str(tmp_path),
        optimizer__total_steps=22,
        training__metrics=(f"{__name__}:doubled_loss",),
        training__evaluate_every=11,
        training__early_stopping_metric="validation_doubled",
        training__early_stopping_mode="min",
    )
    result = own_experiment.train(config)
    assert result.scores["doubled"] == pytest.approx(2 * result.scores["loss"])
    assert result.validation["validation_doubled"] == pytest.approx(2 * result.scores["loss"])
