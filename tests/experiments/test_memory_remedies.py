"""What is said where the training of a run finds no memory."""

import re

import jax
import pytest

from experiments.examples import own_experiment
from experiments.harness.cli import config_files
from experiments.harness.training.memory_remedies import remedies
from experiments.language_modelling import finetune
from experiments.language_modelling import train as language
from experiments.translation import train as translation
from jaxformer.config import with_fields
from tests.experiments.commands import call
from tests.experiments.tiny_runs import language_config


@pytest.mark.parametrize("module", [language, translation, finetune, own_experiment])
def test_a_training_without_memory_is_given_options_that_it_has(module):
    for preset in module.PRESETS.values():
        options = dict(re.findall(r"--([\w.]+)(?: (blocks|blockwise|bfloat16))?", remedies(preset)))
        assert options.keys() <= config_files.settings(preset).keys()
        assert "training.grad_accumulation" in options
        assert any(name.startswith("data.batch_") for name in options)
        settings = {name: value for name, value in options.items() if value}
        advice = remedies(with_fields(preset, settings))
        assert not [name for name in settings if name in advice], "they are set already"


def test_a_training_that_finds_no_memory_says_what_would_lower_its_need(
    tmp_path, monkeypatch, capsys
):
    def prepare(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 1234 bytes")

    monkeypatch.setattr(language, "prepare", prepare)
    done = call(language, language_config(tmp_path))
    assert done.code == 1 and "Traceback" not in done.err
    *_, last = done.err.splitlines()
    assert last.startswith("error: out of memory: 1234 bytes were asked for. Give --training.remat")
    assert "lower --data.batch_size (now 3 sequences)" in last and "batch_tokens" not in last
