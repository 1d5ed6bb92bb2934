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
    (language, "--data.text_field body", "records"),
    (language, "--data.train a.txt b.txt.gz --data.text_field body", "records"),
    (language, "--data.train a.txt=0.3 b.txt=0.7 --data.text_field body", "records"),
    (language, "--data.train my.texts:read --data.text_field body", "records"),
    (language, "--data.train a.jsonl --data.split line", "files of text"),
    (language, "--data.train a.bin --data.split line", "files of text"),
    (language, "--data.tokenizer characters --model.vocab_size 97", "characters has a size"),
    (language, "--data.tokenizer gpt2 --model.vocab_size 50304", "gpt2 has a size"),
    (language, "--sampling.temperature 0 --sampling.top_k 5", "most likely"),
    (language, "--sampling.temperature 0 --completion.seed 5", "most likely"),
    (language, "--training.gather_at use", "--mesh"),
    (language, "--strategy sharded --mesh data=2 --training.gather_at use", "--mesh"),
    (train, "--strategy replicated --training.gather_at use", "--mesh"),
    (train, "--data.train.source_field en", "no file"),
    (
        train,
        "--data.train.source a --data.train.target b --data.train.source_field en",
        "not for a",
    ),
    (train, "--data.train.source a.jsonl --data.train.target b --data.train.target_field de", "b"),
    (train, "--data.train.source a.tsv --data.train.target_field de", "not for a.tsv"),
    (train, "--data.train.source a.jsonl --data.test.source_field en", "no file"),
    (train, "--data.tokenizer characters --model.vocab_size 97", "all characters"),
    (finetune, "--prompts a", "classification continues no text"),
    (finetune, "--preset spans --sampling.temperature 0.3", "spans continues no text"),
    (generate, "--run absent --temperature 0 --top_k 5", "most likely"),
    (generate, "--run absent --temperature 0 --seed 5", "most likely"),
    (own_experiment, "--text_cache_dir a", "no text"),
    (own_experiment, "--training.lora_alpha 3", "lora_rank"),
    (evaluate, "--forced --output a", "--forced"),
    (evaluate, "--forced --beam_size 3", "--forced"),
    (evaluate, "--tokenize char --language zh", "--tokenize"),
    (measure, "--files a.txt --part train", "--files"),
    (runs, "page . .. --text x", "page of one run"),
    (runs, "page . .. --step 3", "page of one run"),
]


def start(module, words, monkeypatch):
    """Runs the command `module` with `words`, up to its work."""
    monkeypatch.setattr("sys.argv", ["command", *words])
    if module is runs:
        runs.main(words)
    elif module is generate:
        generate.parse(words)
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
    chat = "--preset preference --task.beta 0.3 --task.chat_template a --sampling.temperature 0.3"
    assert cli.parse(finetune.PRESETS, chat.split()).task.beta == 0.3


@pytest.mark.parametrize(
    "words",
    [
        "--data.train a.txt b.jsonl.gz=2 --data.text_field body",
        "--data.validation hf:a --data.text_field body",
        "--data.train a.jsonl --data.test b.txt --data.split line",
        "--data.test a.jsonl --data.split line",
        "--model.vocab_size 97",
        "--data.tokenizer tests.experiments.own_parts:tokenizer --model.vocab_size 97",
        "--sampling.temperature 0.3 --sampling.top_k 5 --completion.seed 3",
        "--strategy sharded --mesh fsdp=2 --training.gather_at use",
        "--strategy sharded --mesh sequence=2 --training.gather_at use",
    ],
)
def test_an_option_of_a_language_model_that_changes_something_is_read(words):
    cli.parse(language.PRESETS, words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--data.train.source a.jsonl --data.train.source_field en --data.train.target_field de",
        "--data.train.source a --data.train.target b.parquet --data.train.target_field de",
        "--data.test.source hf:a --data.test.source_field en",
        "--data.tokenizer words --model.vocab_size 97",
    ],
)
def test_an_option_of_a_translator_that_changes_something_is_read(words):
    cli.parse(train.PRESETS, words.split())


SWEEPS = [
    ("translation --optimizer.name adam --optimizer.momentum 0.8", "--optimizer.momentum"),
    ("translation --optimizer.name adam --vary optimizer.momentum=0.8,0.9", "optimizer.momentum"),
    (
        "translation --vary optimizer.name=adam,lion --optimizer.momentum 0.1",
        "--optimizer.momentum",
    ),
    ("translation --vary search.beam_size=3 --search.beam_size 4", "--search.beam_size"),
    ("translation --vary training.seed=3,4 --training.seed 5", "--training.seed"),
    ("translation --vary training.seed=3,4 --seeds 2", "seeds=2"),
    ("translation --vary name=a,b", "name"),
    ("translation --vary runs=a,b", "runs"),
    ("translation --sweep a", "--sweep"),
    ("translation --jobs 2 --cell 0", "jobs=2"),
    ("language_modelling --training.gather_at use", "--training.gather_at"),
]


@pytest.mark.parametrize(("words", "culprit"), SWEEPS, ids=lambda x: str(x)[:60])
def test_a_sweep_refuses_a_setting_without_effect_in_each_of_its_cells(
    words, culprit, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "train_cells", lambda *cells: pytest.fail("it trains"))
    assert cli.run(lambda: sweep.main(words.split())) == 2
    error = capsys.readouterr().err
    assert f"error: {culprit}" in error.replace("varying ", "") or f" its {culprit}," in error
    assert not [*tmp_path.iterdir()], "nothing is made for a sweep that is refused"


@pytest.mark.parametrize(
    "words",
    [
        "--vary optimizer.name=adam,muon --optimizer.momentum 0.8",
        "--vary optimizer.name=adam,muon optimizer.momentum=0.8,0.9 --training.seed 3 --seeds 2",
        "--vary training.seed=3,4 --training.seed 3",
        "--cells tests.experiments.test_sweep:variants --optimizer.b1 0.7 --seeds 2",
    ],
)
def test_a_sweep_reads_a_setting_that_has_an_effect_in_one_of_its_cells(
    words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    begun = []
    monkeypatch.setattr(sweep, "train_cells", lambda module, runs: begun.extend(runs))
    monkeypatch.setattr(sweep, "_print_results", lambda module, runs: 0)
    sweep.main(["translation", *words.split()])
    assert len(begun) > 1


def test_a_sweep_may_vary_what_makes_another_option_count():
    words = "translation --optimizer.name adam --optimizer.momentum 0.8".split()
    config = sweep.registry.parse(words, sweep.SweepOptions(), "").config
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
