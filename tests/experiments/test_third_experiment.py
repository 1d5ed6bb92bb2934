"""A copied experiment is swept, compared and named like those that are here.

What it promises of its runs is in test_contract.py.
"""

from pathlib import Path

import pytest

from experiments import registry, sweep
from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import read_result
from jaxformer.errors import ConfigError


@pytest.mark.long
def test_a_copied_experiment_is_swept_and_compared_by_its_module(reverse, tmp_path, capsys):
    words = ["reverse.train", "--runs", str(tmp_path), "--name", "seeds", "--seeds", "2"]
    words += ["--training.log_every", "0", "--training.evaluate_every", "0"]
    sweep.main(cli.parse(sweep.presets_of("reverse.train"), words, positional="experiment"))
    said = capsys.readouterr().out
    assert "2 of 2 cells are finished" in said
    table = said[said.index("cells are finished") :]
    assert "loss" in table and "unchanged" in table
    folders = Path(tmp_path, "sweeps", "seeds", "reverse").iterdir()
    assert len({read_result(folder).scores["loss"] for folder in folders}) == 2


def test_a_registered_experiment_has_a_name_and_an_unknown_one_is_refused(reverse):
    registry.register("reverse", "reverse.train")
    assert registry.find("reverse").presets is reverse.PRESETS
    assert registry.find("reverse.train").train is reverse.train
    with pytest.raises(ConfigError, match="experiment='forward' is unknown: give translation, lan"):
        registry.find("forward")
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        registry.find("nowhere.train")
    with pytest.raises(ConfigError, match="module experiments.runs has no EXPERIMENT"):
        registry.find("experiments.runs")
