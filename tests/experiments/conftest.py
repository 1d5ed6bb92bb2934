"""Runs that tests read, copy or start from, each trained once a session.

Nobody changes their folders: the workers of a session share them.
"""

from pathlib import Path
from typing import Any

import pytest

from experiments.examples import own_experiment
from experiments.language_modelling import train as language_modelling
from experiments.translation import train as translation
from tests.experiments import tiny_runs
from tests.experiments.trained_runs import Trained, trained_once


@pytest.fixture(scope="session")
def translation_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trained:
    """The run of `finished_translation`."""
    return trained_once(tmp_path_factory, worker_id, translation, tiny_runs.finished_translation)


@pytest.fixture(scope="session")
def causal_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trained:
    """The run of `finished_causal`."""
    return trained_once(tmp_path_factory, worker_id, language_modelling, tiny_runs.finished_causal)


@pytest.fixture(scope="session")
def masked_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trained:
    """The run of `finished_masked`."""
    return trained_once(tmp_path_factory, worker_id, language_modelling, tiny_runs.finished_masked)


@pytest.fixture(scope="session")
def reverse_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trained:
    """A short run of the experiment that stands by itself."""

    def finished_reverse(folder: Path) -> Any:
        return tiny_runs.changed(
            own_experiment.PRESETS["reverse"],
            model__d_model=16,
            model__d_ff=22,
            model__num_heads=2,
            model__num_decoder_layers=1,
            data__batch_size=13,
            optimizer__warmup_steps=2,
            optimizer__total_steps=7,
            training__log_every=1,
            training__save_every=3,
            training__evaluate_every=3,
            training__average_checkpoints=2,
            runs=str(folder / "runs"),
        )

    return trained_once(tmp_path_factory, worker_id, own_experiment, finished_reverse)
