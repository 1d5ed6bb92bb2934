"""A grain MapDataset as batches, with the real package."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.examples.custom_data import GrainBatches
from experiments.language_modelling import train
from jaxformer.errors import DataError
from tests.experiments.commands import call, metrics_of
from tests.experiments.tiny_runs import language_config

grain = pytest.importorskip("grain", reason="needs grain, in the extra test")


def all_rows(count: int) -> np.ndarray:
    return np.arange(count)


def batches_of(rows: np.ndarray, *, seed: int = 3, batch_size: int = 5) -> GrainBatches:
    dataset = grain.MapDataset.source(rows).shuffle(seed=seed)
    return GrainBatches(dataset, batch_size, vocab_size=1009, identity=f"rows, seed {seed}")


def test_batches_are_grains_elements_in_its_order_also_in_later_epochs():
    rows = np.arange(23 * 7).reshape(23, 7)
    batches = batches_of(rows)
    assert batches.steps_per_epoch == 5
    dataset = grain.MapDataset.source(rows).shuffle(seed=3).repeat(4)
    for step in (0, 4, 7, 17):
        batch = batches.batch(step, all_rows)
        expected = np.stack([dataset[i] for i in range(5 * step, 5 * step + 5)])
        np.testing.assert_array_equal(batch.tokens, expected)
        assert batch.loss_mask.all() and batch.example_ids.tolist() == [0, 1, 2, 3, 4]
    epoch = np.concatenate([batches.batch(step, all_rows).tokens for step in range(23)])
    assert sorted(map(tuple, epoch)) == sorted(map(tuple, np.repeat(rows, 5, axis=0)))


def test_a_process_gets_its_rows_alone():
    batches = batches_of(np.arange(23 * 7).reshape(23, 7))
    whole = batches.batch(3, all_rows)
    for chosen in ([1, 4], [], [0]):
        part = batches.batch(3, lambda _, chosen=chosen: np.array(chosen, int))
        np.testing.assert_array_equal(part.tokens, whole.tokens[np.array(chosen, int)])
        assert part.example_ids.tolist() == chosen


def test_a_filtered_element_and_an_id_outside_the_vocabulary_are_refused():
    rows = grain.MapDataset.source(np.arange(23 * 7).reshape(23, 7))
    few = GrainBatches(
        rows.filter(lambda row: row[0] > 70), 5, vocab_size=1009, identity="filtered"
    )
    with pytest.raises(DataError, match="filters"):
        few.batch(0, all_rows)
    small = GrainBatches(rows, 5, vocab_size=29, identity="rows")
    with pytest.raises(DataError, match="vocab_size=29"):
        small.batch(0, all_rows)


def test_a_run_on_a_grain_data_set_trains_and_resumes(tmp_path):
    config = language_config(
        tmp_path,
        name="grain",
        data__batches="experiments.examples.custom_data:from_grain",
        data__isolate_documents=False,
    )
    whole = call(train, config)
    assert whole.code == 0, whole.err
    folder = Path(config.runs) / "language_modelling"
    shutil.copytree(folder / "grain", folder / "stopped")
    saved = (folder / "stopped" / "checkpoints").iterdir()
    shutil.rmtree(max(path for path in saved if path.name.isdigit()))
    again = call(train, replace(config, name="stopped"))
    assert again.code == 0 and "from step 2 to 4" in again.out, again.err
    assert metrics_of(folder / "stopped") == metrics_of(folder / "grain")
