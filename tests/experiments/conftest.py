"""Runs that tests read, copy or start from, each trained once a session.

Nobody changes their folders: the workers of a session share them.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

from experiments.language_modelling import train as language_modelling
from experiments.translation import train as translation
from tests.experiments import tiny_runs
from tests.experiments.copied_experiment import write_copy
from tests.experiments.trained_runs import Trained, trained_once
from tests.made_once import made_once


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
def reverse(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Any:
    """The module of the copied experiment."""
    folder = made_once(tmp_path_factory, "copied_experiment", write_copy, worker_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("reverse.train")


@pytest.fixture(scope="session")
def reverse_run(reverse: Any, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Trained:
    """A run of the copied experiment."""

    def finished_reverse(folder: Path) -> Any:
        return tiny_runs.changed(reverse.PRESETS["reverse"], runs=str(folder / "runs"))

    return trained_once(tmp_path_factory, worker_id, reverse, finished_reverse)
