"""An opened folder gives model, parameters, tokenizers and settings, each alone."""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import to_plain
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.pretrained import PublishedModel, TrainedRun, load_without_weights
from jaxformer.text.tokenizers import train_characters

SIZES = jf.TransformerConfig(10, d_model=6, d_ff=7, num_heads=2, num_decoder_layers=1, max_len=13)
SAMPLING = jf.SamplingConfig(top_k=3, max_new_tokens=5)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def reads(monkeypatch):
    """How often each file was read whole, by its name."""
    counts, read = Counter(), Path.read_bytes

    def counted(path):
        counts[path.name] += 1
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    return counts


@pytest.fixture
def run(tmp_path, random_params):
    """The folder of a run that is not trained yet, and its parameters."""
    model = jf.DecoderOnly(SIZES)
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    (tmp_path / "tokenizer").mkdir()
    train_characters(["abcdef"]).save(tmp_path / "tokenizer" / "tokenizer.json")
    config = {"model": to_plain(SIZES), "sampling": to_plain(SAMPLING), "training": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, params


@pytest.mark.parametrize("name", ["gpt2", "bert", "marian"])
def test_config_json_of_a_published_folder_is_read_once_for_all_parts(folder, reads, name):
    path = folder(name)
    opened = jf.open_folder(path)
    assert isinstance(opened, PublishedModel)
    model = opened.model()
    params, settings = opened.params(model), opened.settings()
    assert opened.tokenizers() == (None, None)
    assert reads["config.json"] == 1
    loaded = jf.load(path)
    assert type(loaded.model) is type(model) and loaded.model.config == model.config
    same(loaded.params, params)
    assert [type(each) for each in loaded.settings] == [type(each) for each in settings]


def test_attention_and_type_of_a_published_model_are_those_that_are_asked_for(folder):
    opened = jf.open_folder(folder("gpt2"))
    attend = jf.auto_attention
    assert opened.model(attend, "bfloat16").attention_fn is attend
    assert opened.model(attend, "bfloat16").config.dtype == "bfloat16"
    assert opened.model().config.dtype == "float32"


def test_a_run_without_a_checkpoint_has_all_parts_but_its_parameters(run, reads):
    folder, _ = run
    opened = jf.open_folder(folder)
    assert isinstance(opened, TrainedRun) and not opened.is_trained
    assert opened.settings() == (SAMPLING,)
    source, target = opened.tokenizers()
    assert source is target and source.decode(source.encode("fed")) == "fed"
    assert opened.model().config == SIZES
    assert reads["config.json"] == 1
    with pytest.raises(CheckpointError, match="checkpoint"):
        opened.with_weights()
    with pytest.raises(CheckpointError, match="weights"):
        opened.params(opened.model())
    assert load_without_weights(folder).params == {}


def test_the_weights_that_are_chosen_of_a_run_are_read(run):
    folder, params = run
    half = jax.tree.map(lambda leaf: leaf * np.float32(0.5), params)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(3, {"params": half}, {})
        checkpoints.save(5, {"params": params}, {})
    opened = jf.open_folder(folder)
    assert opened.is_trained
    newest, older = opened.with_weights(), opened.with_weights(step=3)
    same(newest.params(newest.model()), params)
    same(older.params(older.model()), half)


def test_a_part_of_a_run_that_names_code_is_refused_alone_and_read_where_it_is_trusted(run):
    folder, _ = run
    config = json.loads((folder / "config.json").read_text())
    config["training"]["block"] = "tests.pretrained.test_load_run:NamedBlock"
    (folder / "config.json").write_text(json.dumps(config))
    opened = jf.open_folder(folder)
    assert opened.settings() == (SAMPLING,)
    with pytest.raises(ConfigError, match="NamedBlock"):
        opened.model()
    assert jf.open_folder(folder, trust_code=True).model().block.__name__ == "NamedBlock"
