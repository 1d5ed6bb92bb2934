"""An option that was typed and changes nothing is refused."""

import json
from dataclasses import fields

import pytest

from experiments import runs, sweep
from experiments.examples import own_experiment
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.language_modelling import evaluate as measure
from experiments.language_modelling import finetune, generate
from experiments.language_modelling import train as language
from experiments.language_modelling.finetune_presets import TaskOptions
from experiments.translation import evaluate, train
from jaxformer.errors import ConfigError

REFUSALS = [
    (train, "--optimizer.name adam --optimizer.momentum 0.8", "muon, but the optimizer is adam"),
    (train, "--optimizer.name lion --optimizer.eps 0.8", "adam and muon"),
    (train, "--optimizer.schedule constant --optimizer.min_lr_ratio 0.5", "constant"),
    (train, "--optimizer.decay_fraction 0.5", "wsd"),
    (train, "--training.lora_alpha 32", "lora_rank"),
    (train, "--training.lora_targets query", "lora_rank"),
    (train, "--training.grad_accumulation 2 --training.usual_parts 3", "gives 2 parts"),
    (train, "--data.train.source a --data.train.target b --data.corpus tatoeba", "whole built-in"),
    (train, "--training.evaluate_every 0 --training.eval_beam_size 3", "evaluation"),
    (language, "--data.mask_prob 0.3", "causal"),
    (language, "--preset python_stdlib_masked --data.no_isolate_documents", "causal"),
    (language, "--preset python_stdlib_masked --sampling.temperature 0.3", "fills in"),
    (language, "--preset python_stdlib_masked --completion.seed 3", "fills in"),
    (language, "--data.train a.txt --data.corpus wikitext2", "whole built-in"),
    (finetune, "--task.doc_stride 7", "spans, but the task is classification"),
    (finetune, "--preset chat --task.pooling mean", "classification and pairs"),
    (finetune, "--preset spans --task.beta 0.3", "preference"),
    (finetune, "--preset spans --task.chat_template a", "chat and preference"),
    (own_experiment, "--text_cache_dir a", "no text"),
    (own_experiment, "--training.lora_alpha 3", "lora_rank"),
    (evaluate, "--forced --output a", "--forced"),
    (evaluate, "--forced --beam_size 3", "--forced"),
    (measure, "--files a.txt --part train", "--files"),
    (runs, "page . .. --text x", "page of one run"),
    (runs, "page . .. --step 3", "page of one run"),
]


def start(module, words, monkeypatch):
    """Runs the command `module` with `words`, up to its work."""
    monkeypatch.setattr("sys.argv", ["command", *words])
    if module is runs:
        runs.main(words)
    elif hasattr(module, "PRESETS"):
        cli.parse(module.PRESETS, words, experiment=module.EXPERIMENT)
    else:
        cli.parse({"default": module.EvaluateOptions()}, words)


@pytest.mark.parametrize(("module", "words", "why"), REFUSALS, ids=lambda x: str(x)[:60])
def test_a_typed_option_that_changes_nothing_is_refused_with_the_reason(
    module, words, why, monkeypatch, capsys
):
    option = [word for word in words.split() if word.startswith("--")][-1]
    with pytest.raises(SystemExit) as end:
        start(module, words.split(), monkeypatch)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert f"{option.replace('.no_', '.')} has no effect: " in error and why in error


def test_a_preset_may_hold_what_changes_nothing_and_an_option_that_changes_something_is_read():
    words = "--optimizer.name adam --training.lora_rank 3 --training.lora_alpha 6 --init_from a"
    config = cli.parse(train.PRESETS, [*words.split(), "--model.dropout_rate", "0.2"])
    assert config.optimizer.momentum == 0.9 and config.model.dropout_rate == 0.2
    config = cli.parse(train.PRESETS, ["--optimizer.momentum", "0.8"])
    assert config.optimizer.momentum == 0.8
    own = "--optimizer.name tests.experiments.own_parts:optimizer --optimizer.decay_fraction 0.3"
    assert cli.parse(train.PRESETS, own.split()).optimizer.decay_fraction == 0.3
    chat = "--preset preference --task.beta 0.3 --task.chat_template a"
    assert cli.parse(finetune.PRESETS, chat.split()).task.beta == 0.3


def test_a_sweep_may_vary_what_makes_another_option_count():
    words = "translation --optimizer.name adam --optimizer.momentum 0.8".split()
    _, config, _ = sweep.registry.parse(words, sweep.SweepOptions(), "")
    assert config.optimizer.momentum == 0.8


@pytest.mark.parametrize("module", [train, language, finetune, own_experiment])
def test_each_reason_names_an_option_that_is_there(module):
    for preset in module.PRESETS.values():
        options = config_files.settings(preset)
        for name in preset.without_effect():
            assert any(f"{option}.".startswith(f"{name}.") for option in options), name


def test_each_option_of_a_task_belongs_to_a_kind_or_to_all():
    of_all = {"kind", "num_examples", "from_scratch"}
    of_some = {
        name.removeprefix("task.")
        for preset in finetune.PRESETS.values()
        for name in preset.without_effect()
        if name.startswith("task.")
    }
    assert of_all | of_some == {field.name for field in fields(TaskOptions)}
    assert not of_all & of_some


def test_a_masked_run_is_not_asked_to_continue(tmp_path):
    folder = tmp_path / "masked"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"objective": "masked"}))
    for words in (["--temperature", "0.3"], ["--chat"], ["--max_new_tokens", "7"]):
        with pytest.raises(ConfigError, match="masked model"):
            generate.parse(["--run", str(folder), *words])
    assert generate.parse(["--run", str(folder), "--count", "3"]).count == 3
