"""The default translator learns what its page says; it trains for two minutes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.translation.presets import PRESETS
from experiments.translation.train import train


@pytest.mark.slow
def test_the_default_preset_translates_97_of_100_test_sentences_exactly(tmp_path):
    preset = next(iter(PRESETS.values()))
    assert preset.name == "grammar"
    folder = Path(train(replace(preset, runs=str(tmp_path))).folder)
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["text"] == "test" and scores["exact"] >= 0.97
