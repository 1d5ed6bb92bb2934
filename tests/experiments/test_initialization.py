"""Runs that start from the weights of another run, or go on from its state."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.training.build import build_model
from experiments.harness.training.initialization import first_state, parent_of
from experiments.language_modelling import finetune_presets, load_run
from experiments.language_modelling.presets import PRESETS
from experiments.language_modelling.train import make_step, train
from experiments.translation import presets as translation_presets
from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import single
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.pretrained import load
from jaxformer.records import Record
from jaxformer.text.data import StreamBatch
from jaxformer.training.parameters import flatten
from tests.experiments.commands import bytes_of, metrics_of
from tests.experiments.tiny_runs import changed
from tests.stored import stored

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def parent(causal_run):
    """The folder of a run of seven steps, of which 3, 6 and 7 are kept."""
    return causal_run.folder


@pytest.fixture(scope="module")
def base(causal_run, tmp_path_factory):
    """The settings of `parent` for a run in another folder, without evaluations."""
    folder = tmp_path_factory.mktemp("initialization")
    return changed(causal_run.config, runs=str(folder), training__evaluate_every=0)


def test_a_run_with_a_block_of_its_own_takes_the_weights_and_adds_those_that_are_new(
    base, parent, capsys
):
    own = {"training__block": "tests.experiments.own_parts:OwnBlock"}
    still = {"optimizer__learning_rate": 1e-30, "optimizer__weight_decay": 0.0}
    still |= {"training__ema_decay": 0.0}  # an average of equal values is only nearly that value
    child = changed(base, name="own-block", init_from=str(parent), **own, **still)
    folder = train(changed(child, optimizer__total_steps=2)).folder
    new = "decoder/blocks_0/gain"
    assert f"not in {parent}, so they start anew: {new}" in capsys.readouterr().out
    stored = {path: np.asarray(leaf) for path, leaf in flatten(load(folder).params).items()}
    np.testing.assert_array_equal(stored.pop(new), np.full((1, 1, 1), 1.5, np.float32))
    jax.tree.map(np.testing.assert_array_equal, stored, flatten(load(parent).params))


def test_a_run_with_adapters_keeps_the_weights_and_is_read_merged(base, parent, capsys):
    adapters = {"training__lora_rank": 3, "training__lora_targets": "(query|down)/kernel$"}
    tuned = changed(base, name="adapters", init_from=f"{parent}@7", **adapters)
    tuned = changed(tuned, training__ema_decay=0.0)
    folder = train(changed(tuned, optimizer__total_steps=2)).folder
    assert ", 210 of them trained in adapters" in capsys.readouterr().out
    train(changed(tuned, optimizer__total_steps=3))
    first = flatten(stored(Checkpoints(parent / "checkpoints"), 7, tree="ema"))
    last = flatten(stored(Checkpoints(folder / "checkpoints"), 3))
    assert {path for path in last if path not in first} == {
        f"decoder/blocks_0/{name}/kernel_lora/{leaf}"
        for name in ("attention/query", "feed_forward/down")
        for leaf in ("a", "b", "scale")
    }
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, last[path])
    state = flatten(stored(Checkpoints(folder / "checkpoints"), 3, tree="opt_state"))
    assert all("kernel_lora" in path for path, leaf in state.items() if leaf.ndim)
    merged = flatten(load_run.load_run(folder).params)
    assert merged.keys() == first.keys()
    moved = {path for path, leaf in merged.items() if not np.array_equal(leaf, first[path])}
    assert moved == {path for path in first if path.endswith(("query/kernel", "down/kernel"))}
    for path, leaf in flatten(load(folder).params).items():
        np.testing.assert_array_equal(leaf, merged[path])
    child = train(changed(base, name="grandchild", init_from=str(folder), optimizer__total_steps=1))
    assert (child.folder / "parent.json").exists()


def test_adapters_of_random_weights_are_refused(base):
    with pytest.raises(ConfigError, match="lora_rank=2 "):
        changed(base, training__lora_rank=2)
    with pytest.raises(ConfigError, match="lora_rank=2 .*freeze='up/'"):
        changed(base, init_from="x", optimizer__freeze="up/", training__lora_rank=2)
    with pytest.raises(ConfigError, match=r"lora_targets='\('"):
        changed(base, training__lora_targets="(")


def test_the_schedule_and_the_rate_are_those_of_the_new_run(base, parent):
    changes = {"schedule": "cosine", "learning_rate": 0.5, "total_steps": 6, "warmup_steps": 0}
    changes = {f"optimizer__{name}": value for name, value in changes.items()}
    name = f"{parent}@3"
    child = train(changed(base, name="cosine", continue_from=name, **changes)).folder
    rates = {line["step"]: line["learning_rate"] for line in metrics_of(child, "loss")}
    assert sorted(rates) == [4, 5, 6] and 0.05 < rates[5] < rates[4] < 0.5
    note = {"how": "continue_from", "run": str(parent), "steps": [3]}
    assert Record(child / "parent.json").read() == note
    after = stored(Checkpoints(child / "checkpoints"), 6)
    before = stored(Checkpoints(parent / "checkpoints"), 3)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, before)
    assert max(jax.tree.leaves(moved)) > 0.1, "Adam moves by the rate of the new run"


@pytest.fixture
def begin(base, parent, tmp_path):
    """A function that starts a run of `base` with changes, before its first step is compiled."""

    def begin(fingerprint="", **changes):
        config = load_run.with_pretrained_sizes(changed(base, **changes))
        batch = StreamBatch(np.zeros((4, 20), np.int32), np.ones((4, 19), bool), np.arange(4))
        model, devices = build_model(config), single()
        init, _ = make_step(config, model, batch, devices)
        checkpoints = Checkpoints(tmp_path / "no")
        run = SimpleNamespace(
            config=config, checkpoints=checkpoints, devices=devices, folder=tmp_path
        )
        batches = SimpleNamespace(fingerprint=fingerprint)
        task = SimpleNamespace(model=model, batches=batches, read_start=None)
        return first_state(run, task, init)

    return begin


@pytest.mark.parametrize(
    ("error", "said", "changes"),
    [
        (ConfigError, "is at step 7 already, but optimizer.total_steps=7: give more", {}),
        (ConfigError, "was trained on other batches than these", {"fingerprint": "other"}),
        (CheckpointError, "does not fit this model and opt", {"optimizer__name": "lion"}),
        (ConfigError, "without an optimizer state", {"continue_from": "@best"}),
        (CheckpointError, "has no checkpoint of step 4", {"continue_from": "@4"}),
        (ConfigError, "both say where the weights come from", {"init_from": "gpt2"}),
    ],
)
def test_what_cannot_be_continued_is_refused(error, said, changes, begin, parent):
    fingerprint = Checkpoints(parent / "checkpoints").metadata()["data"]
    changes = {"continue_from": str(parent), "fingerprint": fingerprint} | changes
    if changes["continue_from"].startswith("@"):
        changes["continue_from"] = f"{parent}{changes['continue_from']}"
    with pytest.raises(error, match=said):
        begin(**changes)


@pytest.mark.parametrize(
    ("start", "option", "name"),
    [
        ("init_from", "training.model", "jaxformer.nn.models:DecoderOnly"),
        ("continue_from", "training.model", "jaxformer.nn.models:DecoderOnly"),
        ("continue_from", "training.block", "tests.experiments.own_parts:OwnBlock"),
    ],
)
def test_another_model_than_the_starts_is_refused_by_its_option(start, option, name, base, parent):
    changes = {start: str(parent), option.replace(".", "__"): name}
    with pytest.raises(ConfigError, match=f"{option}='{name}'"):
        train(changed(base, name="other", **changes))


@pytest.fixture(scope="module")
def tuned(base, parent):
    """A run from step 3 of the parent, on other text, at a rate of 0: it keeps the weights."""
    other = (base.data.train[0].replace("a.txt", "b.txt"),)
    config = changed(
        base,
        name="tuned",
        init_from=f"{parent}@3",
        model__d_model=24,
        model__dropout_rate=0.3,
        data__train=other,
        optimizer__learning_rate=0.0,
        optimizer__total_steps=1,
    )
    return config, train(config).folder


def test_a_run_starts_from_the_weights_the_sizes_and_the_tokenizer_of_another(parent, tuned):
    _, folder = tuned
    assert bytes_of(folder, 1) == bytes_of(parent, 3, "ema") != bytes_of(parent, 7, "ema")
    loaded = load_run.load_run(folder)
    assert (loaded.config.model.d_model, loaded.config.model.dropout_rate) == (16, 0.3)
    files = [run / "tokenizer" / "tokenizer.json" for run in (folder, parent)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((folder / "parent.json").read_text())["steps"] == [3]


@pytest.mark.slow
def test_a_child_is_resumed_without_its_parent_and_has_children(base, parent, tmp_path):
    shutil.copytree(parent, tmp_path / "runs" / "language_modelling" / "other")
    other = tmp_path / "runs" / "language_modelling" / "other"
    child = changed(base, name="child", runs=str(tmp_path / "runs"), init_from=str(other))
    folder = train(child).folder
    child_bytes = bytes_of(folder, 7)
    shutil.rmtree(other)
    words = ["--resume", str(folder), "--optimizer.total_steps", "8"]
    resumed = cli.parse(PRESETS, words, experiment="language_modelling")
    assert resumed.init_from and parent_of(resumed) is None
    assert Checkpoints(train(resumed).folder / "checkpoints").newest_step() == 8
    grandchild = changed(child, name="grandchild", init_from=str(folder), model__vocab_size=999)
    assert bytes_of(train(grandchild).folder, 7) != child_bytes


def test_parameters_of_other_shapes_are_refused_by_name(base, parent, begin, tmp_path):
    copy = tmp_path / "runs" / "language_modelling" / "copy"
    shutil.copytree(parent, copy)
    content = (copy / "config.json").read_text()
    (copy / "config.json").write_text(content.replace('"d_ff": 22', '"d_ff": 26'))
    message = r"copy/checkpoints: \S*feed_forward\S* is \(.*22.*\) in params, but \(.*26"
    with pytest.raises(CheckpointError, match=message):
        begin(init_from=str(copy))


def test_the_command_line_continues_a_run_with_its_settings_under_a_new_name(parent, capsys):
    words = ["--continue_from", f"{parent}@6", "--optimizer.total_steps", "9"]
    config = cli.parse(PRESETS, words, experiment="language_modelling")
    assert config.name == "tiny-continued" and config.continue_from == f"{parent}@6"
    assert (config.model.d_model, config.optimizer.total_steps) == (16, 9)
    assert config.runs == str(parent.parents[1])
    named = cli.parse(PRESETS, [*words, "--name", "b"], experiment="language_modelling")
    assert named.name == "b"
    with pytest.raises(SystemExit):
        cli.parse(PRESETS, [*words, "--resume", str(parent)], experiment="language_modelling")
    assert "leave out --config, --preset and --continue_from" in capsys.readouterr().err


def test_an_option_that_the_weights_to_start_from_decide_is_refused_where_it_differs(
    parent, capsys
):
    def parsed(words):
        words = [*words.split(), "--init_from", f"{parent}@3"]
        return cli.parse(PRESETS, words, experiment="language_modelling")

    assert parsed("--model.d_model 16 --model.dropout_rate 0.25").model.dropout_rate == 0.25
    for words, said in (
        ("--model.d_model 32", "model.d_model is 32 here, but 16 in"),
        ("--model.positions sinusoidal", "model.positions.type is"),
        ("--data.tokenizer words", 'data.tokenizer is "words" here, but'),
    ):
        with pytest.raises(SystemExit):
            parsed(words)
        err = capsys.readouterr().err
        assert said in err and "weights this run starts from: leave the option out" in err


def test_a_default_that_leaves_the_setting_of_the_start_is_refused(capsys):
    def parsed(module, *words):
        kind = ["--preset", "chat"] if module is finetune_presets else []
        return cli.parse(module.PRESETS, ["--init_from", "a/folder", *kind, *words])

    for module, word, default, other in (
        (translation_presets, "--search.beam_size", "4", "5"),
        (translation_presets, "--translation.prefix", "", "read: "),
        (finetune_presets, "--sampling.temperature", "1.0", "0.5"),
    ):
        assert parsed(module, word, other)
        with pytest.raises(SystemExit):
            parsed(module, word, default)
        assert "is the default, with which a run has what" in capsys.readouterr().err
    assert parsed(finetune_presets, "--data.no_isolate_documents")
    with pytest.raises(SystemExit):
        parsed(finetune_presets, "--data.isolate_documents")
    assert "data.isolate_documents=True is the default" in capsys.readouterr().err
