"""The parts of a batch on a GPU: the fewest that its memory holds."""

import json

import pytest

from experiments.harness.training import starting
from experiments.harness.training.fewest_parts import fewest_parts
from experiments.language_modelling import train
from experiments.translation import train as translation_train
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import changed, language_config, translation_config


@pytest.mark.parametrize(
    "gigabytes, expected", [(80, 8), (200, 3), (23, 30), (28, 24), (20, 40), (7, 40), (2000, 1)]
)
def test_the_fewest_parts_that_fit_divide_the_rows(gigabytes, expected):
    """Of 480 rows each adds 1 GB to 7 GB, as the steps of 12 and of 15 rows say."""
    asked = []

    def memory_of(count):
        asked.append(count)
        return 7e9 + 1e9 * 480 / count

    assert fewest_parts(memory_of, gigabytes * 1e9, 480, 40) == expected
    assert sorted(asked) == [32, 40]  # no more programs are compiled


@pytest.mark.parametrize(("rows", "expected"), [(7, 1), (0, 3)])
def test_rows_that_do_not_divide_leave_nothing_to_choose(rows, expected):
    assert fewest_parts(lambda count: 1e9, 8e9, rows, 3) == expected


def test_a_gpu_takes_the_fewest_parts_that_fit_and_the_run_keeps_them(tmp_path, monkeypatch):
    config = language_config(
        tmp_path, name="gpu", training__usual_parts=6, data__batch_size=6, optimizer__total_steps=2
    )
    memory = {"bytes": None}
    monkeypatch.setattr(starting, "gpu_memory", lambda devices: memory["bytes"])

    def stored(config):
        train.train(config)
        folder = tmp_path / "runs" / "language_modelling" / config.name
        return json.loads((folder / "config.json").read_text())["training"], metrics_of(folder)

    training, cpu = stored(changed(config, name="cpu"))
    assert training["grad_accumulation"] is None  # on a CPU nothing is chosen
    memory["bytes"] = 1e12
    training, _ = stored(config)
    assert training["grad_accumulation"] == 1
    memory["bytes"] = 1.0  # with less memory than before the run goes on as it began
    training, gpu = stored(changed(config, optimizer__total_steps=2, training__log_every=1))
    assert training["grad_accumulation"] == 1
    assert gpu[0]["loss"] == pytest.approx(cpu[0]["loss"], rel=1e-5)
    training, _ = stored(changed(config, name="given", training__grad_accumulation=3))
    assert training["grad_accumulation"] == 3


@pytest.mark.parametrize(
    ("command", "configure"),
    [(train, language_config), (translation_train, translation_config)],
    ids=["language model", "translator"],
)
def test_an_evaluation_uses_the_parts_that_were_found(command, configure, tmp_path, monkeypatch):
    config = configure(
        tmp_path,
        name="gpu",
        training__usual_parts=6,
        training__evaluate_every=1,
        training__metrics=("tests.experiments.own_parts:parts",),
        optimizer__total_steps=2,
    )
    monkeypatch.setattr(starting, "gpu_memory", lambda devices: 1e12)
    folder = command.train(config).folder
    found = json.loads((folder / "config.json").read_text())["training"]["grad_accumulation"]
    evaluated = [line["validation_parts"] for line in metrics_of(folder, "validation_loss")]
    assert found == 1 and evaluated == [1, 1]
    assert json.loads((folder / "scores.json").read_text())["parts"] == 1
    assert command.train(config).folder == folder, "it has the same batches when it is resumed"
