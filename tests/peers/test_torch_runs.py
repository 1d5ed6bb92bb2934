"""Runs that PyTorch trains are read by all commands. Run with `-m peer`; needs torch."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from experiments.harness.results.comparing import compare as compare_runs
from experiments.language_modelling import load_run as language_run
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.torch_reference import compare, train_gpt, train_translation
from experiments.translation import train as translation_train
from experiments.translation.load_run import load_run
from experiments.translation.presets import PRESETS
from jaxformer.errors import ConfigError, MissingExtra
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import changed, translation_config

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """A short run on a text of one's own, 4,009 characters long."""
    folder = tmp_path_factory.mktemp("characters")
    text = folder / "text.txt"
    text.write_text("to be or not to be\n" * 211, encoding="utf-8")
    return changed(
        LANGUAGE_PRESETS["shakespeare_char_cpu"],
        model__d_model=32,
        model__d_ff=52,
        model__num_decoder_layers=1,
        data__train=(str(text),),
        data__batch_size=7,
        data__seq_len=19,
        optimizer__learning_rate=1e-2,
        optimizer__warmup_steps=3,
        optimizer__total_steps=17,
        training__log_every=1,
        training__evaluate_every=0,
        sampling__max_new_tokens=5,
        runs=str(folder / "runs"),
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A short translation of lines in reverse."""
    preset = PRESETS["multi30k_tiny"]
    return translation_config(
        tmp_path_factory.mktemp("pairs"),
        model__positions=preset.model.positions,
        model__dropout_rate=0.1,
        optimizer__warmup_steps=3,
        optimizer__total_steps=13,
        training__evaluate_every=7,
        training__save_every=5,
        training__average_checkpoints=2,
    )


def losses(folder):
    return [line["loss"] for line in metrics_of(folder, "loss")]


def test_a_language_model_of_pytorch_is_measured_and_compared_as_one_of_jaxformer(characters):
    train_gpt.main(characters)
    ours = language_train.train(characters).folder
    theirs = ours.parents[1] / "torch_reference" / "language_modelling" / ours.name
    loaded = language_run.load_run(theirs)
    assert isinstance(loaded.model, DecoderOnly)
    found = losses(theirs)
    assert len(found) == len(losses(ours)) == 17
    assert 0.1 < found[-1] < found[0] - 0.3, "or nothing was learned"
    compared = compare_runs([ours, theirs])
    assert [group.runs[0].folder for group in compared.groups] == [ours, theirs]
    assert compared.differences[0].paired


def test_a_translation_of_pytorch_is_scored_and_compared_as_one_of_jaxformer(pairs):
    train_translation.main(pairs)
    ours = translation_train.train(pairs).folder
    theirs = ours.parents[1] / "torch_reference" / "translation" / ours.name
    loaded = load_run(theirs)
    assert isinstance(loaded.model, EncoderDecoder)
    assert json.loads((theirs / "weights.json").read_text())["steps"] in ([10, 13], [7])
    found = losses(theirs)
    assert len(found) == len(losses(ours)) == 13
    assert found[-1] < found[0] - 0.1, "or nothing was learned"
    compared = compare_runs([ours, theirs], "chrf")
    assert [group.runs[0].folder for group in compared.groups] == [ours, theirs]
    shutil.rmtree(theirs / "checkpoints" / "13")
    with pytest.raises(ConfigError, match="has been trained, and a run of PyTorch is not resumed"):
        train_translation.main(pairs)


def test_what_the_reference_does_not_have_is_refused(characters, pairs):
    own = replace(characters.data, isolate_documents=True)
    with pytest.raises(ConfigError, match="data.isolate_documents=True is not supported by"):
        train_gpt.main(replace(characters, data=own))
    r_drop = replace(pairs.training, r_drop=1.0)
    with pytest.raises(ConfigError, match=r"training.r_drop=1.0 is not supported by"):
        train_translation.main(replace(pairs, training=r_drop))


def test_the_commands_without_torch_say_so(characters, pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    commands = {train_gpt: characters, train_translation: pairs}
    commands[compare] = compare.presets()["grammar"]
    for command, config in commands.items():
        with pytest.raises(MissingExtra, match="torch is needed but not installed"):
            command.main(config)
