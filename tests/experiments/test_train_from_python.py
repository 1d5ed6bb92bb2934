"""A script trains runs by calling `train`, and gets their folders and scores."""

import json
import shutil

import numpy as np

from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.training.build import build_model
from experiments.language_modelling.train import make_step
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import single
from jaxformer.text.data import StreamBatch
from tests.experiments.tiny_runs import changed


def test_a_finished_run_gives_its_folder_and_scores_again(causal_run, tmp_path):
    shutil.copytree(causal_run.text / "runs", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "language_modelling" / "tiny"
    before = read_result(folder)
    again = causal_run.train.main(changed(causal_run.config, runs=str(tmp_path)))
    assert again == before and isinstance(again, TrainResult) and again.folder == folder
    assert again.scores.items() <= json.loads((folder / "scores.json").read_text()).items()
    validation = json.loads((folder / "weights.json").read_text())["validation_loss"]
    assert again.validation["validation_loss"] == validation
    steps = Checkpoints(folder / "checkpoints").steps()
    assert set(again.steps) <= set(steps) and steps[-1] == 7


def test_the_step_of_runs_that_differ_in_seed_and_learning_rate_is_one_program(causal_run):
    programs = set()
    for seed, rate in enumerate((1e-2, 1e-3)):
        changes = {"training__seed": seed, "optimizer__learning_rate": rate}
        run = changed(causal_run.config, training__grad_accumulation=1, **changes)
        batch = StreamBatch(np.zeros((3, 20), np.int32), np.ones((3, 19), bool), np.arange(3))
        init, step = make_step(run, build_model(run), batch, single())
        state, placed = single().abstract(init), single().abstract_batch(batch)
        programs.add(step.lower(state, placed).as_text())
    assert len(programs) == 1
