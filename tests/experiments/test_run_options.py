"""The weights of a run that --checkpoint and --step name."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.runs.decoding_options import load_members
from experiments.harness.runs.run_options import RunOptions
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.pretrained.run_weights import weights_of

TRAINING = {"average_checkpoints": 2, "ema_decay": 0.9}
NUMBERS = {2: 20.0, 3: 70.0, 4: 30.0, 6: 50.0}
"""The parameters of each step."""
METRICS = {2: 7.0, 4: 1.0, 6: 3.0}


@pytest.fixture
def folder(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=7) as checkpoints:
        for step, number in NUMBERS.items():
            state = {"params": {"a": np.full(3, number)}, "ema": {"a": np.full(3, number + 1)}}
            checkpoints.save(step, state, {}, METRICS.get(step))
    weights_of(tmp_path).write({"steps": [2, 6], "tree": "ema", "validation_loss": 1.0})
    return tmp_path


def number(folder, training=TRAINING, **options):
    (folder / "config.json").write_text(json.dumps({"training": training}))
    params = RunOptions(str(folder), **options).weights.read()
    (leaf,) = jax.tree.leaves(params)
    return float(leaf[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (20 + 50) / 2 + 1),
        ({"checkpoint": "best"}, 31),
        ({"checkpoint": "last"}, 50),
        ({"checkpoint": "average"}, (30 + 50) / 2 + 1),
        ({"checkpoint": "ema"}, 51),
        ({"step": 3}, 71),
        ({"step": 3, "checkpoint": "last"}, 70),
        ({"step": 4, "checkpoint": "ema"}, 31),
    ],
)
def test_each_option_names_its_weights(folder, options, expected):
    assert number(folder, **options) == expected


def test_without_regular_checkpoints_the_average_is_the_last_one_alone(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=7) as checkpoints:
        for step in (3, 5, 7):  # saved on preemption, on preemption and at the end
            checkpoints.save(step, {"params": {"a": np.full(3, step)}}, regular=False)
    training = {"average_checkpoints": 5}
    assert number(tmp_path, training, checkpoint="average") == 7


def test_without_a_moving_average_the_parameters_are_the_weights(folder):
    training = {"average_checkpoints": 2}
    assert number(folder, training, checkpoint="best") == 30
    assert number(folder, training, step=3) == 70
    with pytest.raises(ConfigError, match="moving average"):
        number(folder, training, checkpoint="ema")


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(folder):
    with pytest.raises(CheckpointError, match="step 5"):
        number(folder, step=5)


def test_a_newest_step_that_only_its_validation_has_saved_is_not_averaged(folder):
    with Checkpoints(folder / "checkpoints", keep=7) as checkpoints:
        state = {"params": {"a": np.full(3, 90.0)}, "ema": {"a": np.full(3, 91.0)}}
        checkpoints.save(7, state, {"saved_as_best": True}, 0.5, regular=False)
    assert number(folder, checkpoint="average") == (30 + 50) / 2 + 1
    assert number(folder, checkpoint="best") == number(folder, checkpoint="ema") == 91


def test_two_options_that_choose_a_step_are_refused(folder):
    with pytest.raises(ConfigError, match="step=3 and checkpoint='best'"):
        number(folder, step=3, checkpoint="best")
    with pytest.raises(ConfigError, match="checkpoint='newest'"):
        RunOptions(checkpoint="newest")


def test_a_pretrained_folder_has_no_other_weights(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=str(folder)):
        jf.load(folder, step=3)


def test_an_ensemble_of_two_kinds_of_models_is_refused():
    class Other(jf.EncoderDecoder):
        pass

    sizes = jf.TransformerConfig(23, 10, 14, 2, num_encoder_layers=1, num_decoder_layers=1)
    models = {"own": Other(sizes), "plain": jf.EncoderDecoder(sizes)}

    def load(path):
        return SimpleNamespace(model=models[path.name], tokenizer=None, target_tokenizer=None)

    with pytest.raises(ConfigError, match="model"):
        load_members(load, "own,plain")
