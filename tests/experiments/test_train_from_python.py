"""A script trains runs by calling `train`, and gets their folders and scores."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.harness.runs.checkpoint_selection import TrainResult, read_result
from experiments.language_modelling.objectives import build_model
from experiments.language_modelling.presets import LanguageConfig
from experiments.language_modelling.train import make_init_and_step, train
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.text.data import StreamBatch
from tests.experiments.tiny_runs import language_config


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> LanguageConfig:
    return language_config(tmp_path_factory.mktemp("script"))


def with_seed(config: LanguageConfig, seed: int, name: str) -> LanguageConfig:
    return replace(config, name=name, training=replace(config.training, seed=seed))


@pytest.mark.long
def test_several_runs_in_one_process_return_their_folders_and_scores(config):
    first, second, third = (
        train(with_seed(config, seed, name))
        for seed, name in ((1, "first"), (2, "second"), (1, "third"))
    )
    for result in (first, second, third):
        stored = json.loads((result.folder / "scores.json").read_text())
        assert result.scores == stored and stored["text"] == "validation"
        assert result.validation["validation_loss"] == pytest.approx(stored["loss"])
        assert set(result.steps) <= set(Checkpoints(result.folder / "checkpoints").steps())
    assert [result.folder.name for result in (first, second, third)] == ["first", "second", "third"]
    assert first.scores == third.scores and first.scores != second.scores


def test_the_step_of_runs_that_differ_in_seed_and_learning_rate_is_one_program(config):
    programs = set()
    for seed, rate in enumerate((1e-2, 1e-3)):
        run = replace(
            with_seed(config, seed, f"rate{seed}"),
            optimizer=replace(config.optimizer, learning_rate=rate),
        )
        batch = StreamBatch(np.zeros((3, 20), np.int32), np.ones((3, 19), bool), np.arange(3))
        init, step = make_init_and_step(run, build_model(run), batch, single())
        state, placed = single().abstract(init), single().abstract_batch(batch)
        programs.add(step.lower(state, placed).as_text())
    assert len(programs) == 1


def test_a_finished_run_gives_its_result_again(config):
    before = train(with_seed(config, 1, "again"))
    newest = Checkpoints(before.folder / "checkpoints").newest_step()
    assert train(with_seed(config, 1, "again")) == before == read_result(before.folder)
    assert newest == Checkpoints(before.folder / "checkpoints").newest_step() == 4
    assert isinstance(before, TrainResult)


def test_a_training_without_scores_has_no_result(tmp_path):
    with pytest.raises(ConfigError, match="has no scores.json: finish its training first"):
        read_result(tmp_path)
