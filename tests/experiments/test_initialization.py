"""Runs that start from the weights of another run, or go on from its state."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments import runs
from experiments.harness import cli
from experiments.harness.training.initialization import NOTE, parent_of
from experiments.language_modelling import load_run
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import train
from experiments.translation import load_run as translation_run
from experiments.translation.train import train as train_translation
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.pretrained import load
from jaxformer.training.parameters import flatten
from tests.experiments.commands import bytes_of, metrics_of
from tests.experiments.tiny_runs import changed, language_config, translation_config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> LanguageConfig:
    return language_config(
        tmp_path_factory.mktemp("initialization"),
        name="parent",
        model__dropout_rate=0.1,
        optimizer__schedule="constant",
        training__evaluate_every=0,
        training__log_every=1,
    )


@pytest.fixture(scope="module")
def parent(base):
    return train(base).folder


def steps_of(folder):
    """The numbers of each training step, by the step."""
    names = ("step", "loss", "grad_norm", "learning_rate")
    return {line["step"]: [line[name] for name in names] for line in metrics_of(folder, "loss")}


def test_a_continued_run_is_to_the_bit_the_run_that_went_on(base, parent, capsys):
    longer = {"optimizer__total_steps": 7}
    child = train(changed(base, name="child", continue_from=str(parent), **longer)).folder
    assert "from step 4 to 7" in capsys.readouterr().out
    whole = train(changed(base, name="whole", **longer)).folder
    assert bytes_of(child, 7) == bytes_of(whole, 7)
    expected = steps_of(whole)
    assert steps_of(child) == {step: expected[step] for step in (5, 6, 7)}
    runs.main(["list", str(base.runs)])
    rows = capsys.readouterr().out.splitlines()
    children = [row.startswith(f"{child} ") for row in rows]
    assert [f"{parent}@4" in row for row in rows] == children and any(children)
    again = train(changed(base, name="child", continue_from=str(parent), **longer))
    assert Checkpoints(again.folder / "checkpoints").newest_step() == 7


def test_a_run_with_a_block_of_its_own_takes_the_weights_and_adds_those_that_are_new(
    base, parent, capsys
):
    own = {"training__block": "tests.experiments.own_parts:OwnBlock"}
    still = {"optimizer__learning_rate": 1e-30, "optimizer__weight_decay": 0.0}
    child = changed(base, name="own-block", init_from=str(parent), **own, **still)
    folder = train(changed(child, optimizer__total_steps=2)).folder
    new = "decoder/blocks_0/gain"
    assert f"not in {parent}, so they start anew: {new}" in capsys.readouterr().out
    stored = {path: np.asarray(leaf) for path, leaf in flatten(load(folder).params).items()}
    np.testing.assert_array_equal(stored.pop(new), np.full((1, 1, 1), 1.5, np.float32))
    jax.tree.map(np.testing.assert_array_equal, stored, flatten(load(parent).params))


def test_a_run_with_adapters_keeps_the_weights_and_is_read_merged(base, parent, capsys):
    adapters = {"training__lora_rank": 3, "training__lora_targets": "(query|down)/kernel$"}
    tuned = changed(base, name="adapters", init_from=str(parent), **adapters)
    folder = train(changed(tuned, optimizer__total_steps=2)).folder
    assert ", 210 of them trained in adapters" in capsys.readouterr().out
    train(tuned)
    first, last = (
        flatten(Checkpoints(where / "checkpoints").restore_params(4)) for where in (parent, folder)
    )
    assert {path for path in last if path not in first} == {
        f"decoder/blocks_0/{name}/kernel_lora/{leaf}"
        for name in ("attention/query", "feed_forward/down")
        for leaf in ("a", "b", "scale")
    }
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, last[path])
    state = flatten(Checkpoints(folder / "checkpoints").restore_params(4, tree="opt_state"))
    assert all("kernel_lora" in path for path, leaf in state.items() if leaf.ndim)
    merged = flatten(load_run.load_run(folder).params)
    assert merged.keys() == first.keys()
    moved = {path for path, leaf in merged.items() if not np.array_equal(leaf, first[path])}
    assert moved == {path for path in first if path.endswith(("query/kernel", "down/kernel"))}
    for path, leaf in flatten(load(folder).params).items():
        np.testing.assert_array_equal(leaf, merged[path])
    child = train(changed(base, name="grandchild", init_from=str(folder), optimizer__total_steps=1))
    assert (child.folder / NOTE).exists()


def test_adapters_of_random_weights_are_refused(base):
    with pytest.raises(ConfigError, match="lora_rank=2 trains adapters of weights that are there"):
        changed(base, training__lora_rank=2)
    with pytest.raises(ConfigError, match="lora_rank=2 freezes all weights, but freeze='up/'"):
        changed(base, init_from="x", optimizer__freeze="up/", training__lora_rank=2)
    with pytest.raises(ConfigError, match=r"lora_targets='\(' is not a regular expression"):
        changed(base, training__lora_targets="(")


def test_the_schedule_and_the_rate_are_those_of_the_new_run(base, parent):
    changes = {"schedule": "cosine", "learning_rate": 0.5, "total_steps": 6, "warmup_steps": 0}
    changes = {f"optimizer__{name}": value for name, value in changes.items()}
    name = f"{parent}@2"
    child = train(changed(base, name="cosine", continue_from=name, **changes)).folder
    rates = {step: line[3] for step, line in steps_of(child).items()}
    assert sorted(rates) == [3, 4, 5, 6] and 0.05 < rates[4] < rates[3] < 0.5
    assert json.loads((child / NOTE).read_text()) == {
        "how": "continue_from",
        "run": str(parent),
        "steps": [2],
    }
    after = Checkpoints(child / "checkpoints").restore_params(6)
    before = Checkpoints(parent / "checkpoints").restore_params(2)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, before)
    assert max(jax.tree.leaves(moved)) > 0.1, "Adam moves by the rate of the new run"


def test_what_cannot_be_continued_is_refused(base, parent):
    def refused(error, message, **changes):
        with pytest.raises(error, match=message):
            train(changed(base, **({"name": "no", "continue_from": str(parent)} | changes)))

    more = {"optimizer__total_steps": 9}
    refused(ConfigError, "is at step 4 already, but optimizer.total_steps=4: give more")
    refused(ConfigError, "was trained on other batches than these", training__seed=5, **more)
    refused(
        CheckpointError, "does not fit this model and optimizer", optimizer__name="lion", **more
    )
    refused(ConfigError, "without an optimizer state", continue_from=f"{parent}@best", **more)
    refused(ConfigError, "'nowhere' is not the folder of a trained run", continue_from="nowhere")
    refused(ConfigError, "both say where the weights come from", init_from="gpt2")
    absent = {"continue_from": f"{parent}@3"}
    refused(CheckpointError, "no committed checkpoint of step 3", **absent, **more)


@pytest.fixture(scope="module")
def tuned(base, parent):
    """A run from step 2 of the parent, on other text, at a rate of 0: it keeps the weights."""
    other = (base.data.train[0].replace("a.txt", "b.txt"),)
    config = changed(
        base,
        name="tuned",
        init_from=f"{parent}@2",
        model__d_model=24,
        model__dropout_rate=0.3,
        data__train=other,
        optimizer__learning_rate=0.0,
        optimizer__total_steps=1,
        training__ema_decay=0.5,
    )
    return config, train(config).folder


def test_a_run_starts_from_the_weights_the_sizes_and_the_tokenizer_of_another(parent, tuned):
    _, folder = tuned
    assert bytes_of(folder, 1) == bytes_of(parent, 2) != bytes_of(parent, 4)
    loaded = load_run.load_run(folder)
    assert (loaded.config.model.d_model, loaded.config.model.dropout_rate) == (16, 0.3)
    files = [run / "tokenizer" / "tokenizer.json" for run in (folder, parent)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((folder / NOTE).read_text())["steps"] == [2]


@pytest.mark.slow
def test_a_child_is_resumed_without_its_parent_and_has_children(base, parent, tmp_path):
    shutil.copytree(parent, tmp_path / "runs" / "language_modelling" / "other")
    other = tmp_path / "runs" / "language_modelling" / "other"
    child = changed(base, name="child", runs=str(tmp_path / "runs"), init_from=str(other))
    folder = train(child).folder
    shutil.rmtree(other)
    words = ["--resume", str(folder), "--optimizer.total_steps", "5"]
    resumed = cli.parse(PRESETS, words, experiment="language_modelling")
    assert resumed.init_from and parent_of(resumed) is None
    assert Checkpoints(train(resumed).folder / "checkpoints").newest_step() == 5
    grandchild = changed(child, name="grandchild", init_from=str(folder), model__vocab_size=999)
    assert bytes_of(train(grandchild).folder, 4) != bytes_of(folder, 4)


def test_parameters_of_other_shapes_are_refused_by_name(base, parent, tmp_path):
    copy = tmp_path / "runs" / "language_modelling" / "copy"
    shutil.copytree(parent, copy)
    content = (copy / "config.json").read_text()
    (copy / "config.json").write_text(content.replace('"d_ff": 22', '"d_ff": 26'))
    message = r"copy does not fit this model: \S*feed_forward\S* is \(.*22.*\) there, but \(.*26"
    with pytest.raises(ConfigError, match=message):
        train(changed(base, name="wrong", init_from=str(copy)))
    masked = PRESETS["bert_tiny"]
    with pytest.raises(ConfigError, match="parent has the objective 'causal', but this run has"):
        train(replace(masked, name="wrong", runs=base.runs, init_from=str(parent)))


def test_the_command_line_continues_a_run_with_its_settings_under_a_new_name(parent, capsys):
    words = ["--continue_from", f"{parent}@4", "--optimizer.total_steps", "9"]
    config = cli.parse(PRESETS, words, experiment="language_modelling")
    assert config.name == "parent-continued" and config.continue_from == f"{parent}@4"
    assert (config.model.d_model, config.optimizer.total_steps) == (16, 9)
    assert config.runs == str(parent.parents[1])
    named = cli.parse(PRESETS, [*words, "--name", "b"], experiment="language_modelling")
    assert named.name == "b"
    with pytest.raises(SystemExit):
        cli.parse(PRESETS, [*words, "--resume", str(parent)], experiment="language_modelling")
    assert "leave out --config, --preset and --continue_from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_translation_starts_from_another_with_its_tokenizers_and_goes_on(tmp_path):
    config = translation_config(tmp_path, name="first")
    first = train_translation(config).folder
    other = {"data__train": config.data.test, "data__batch_tokens": 8}
    changes = {"name": "second", "init_from": str(first), **other}
    rate = {"optimizer__learning_rate": 0.0, "model__d_ff": 26}
    second = train_translation(changed(config, **changes, **rate)).folder
    assert bytes_of(second, 2) == bytes_of(first, 2)
    found, before = (translation_run.load_run(folder) for folder in (second, first))
    assert found.target_tokenizer.fingerprint == before.target_tokenizer.fingerprint
    with pytest.raises(ConfigError, match="init_from='gpt2' is not the folder of a trained run"):
        train_translation(changed(config, name="third", init_from="gpt2"))
    longer = changed(config, name="longer", continue_from=str(first), optimizer__total_steps=3)
    assert list(steps_of(train_translation(longer).folder)) == [3]
