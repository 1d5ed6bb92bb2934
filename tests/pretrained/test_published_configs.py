"""Keys of config.json: published files are read, or refused for a true reason."""

import copy
import warnings

import pytest

from jaxformer.config import Rotary, Yarn
from jaxformer.errors import ConfigError
from jaxformer.pretrained.families import find
from jaxformer.pretrained.family import read_config
from tests.pretrained.published_configs import PUBLISHED, reason

OF_TYPE = {x["model_type"]: x for name, x in PUBLISHED.items() if reason(name) is None}


def read(config):
    return read_config(find(config)[0], config)


def test_forty_published_models_are_read_or_refused_for_what_they_compute():
    assert len(PUBLISHED) >= 40
    for name, config in PUBLISHED.items():
        if reason(name) is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert read(config).vocab_size == config["vocab_size"], name
        else:
            with pytest.raises(ConfigError, match=reason(name)):
                read(config)


def test_unknown_keys_are_ignored_and_named_in_one_line():
    changes = {"is_llama_config": True, "internal_version": "7b", "unused": None, "off": False}
    config = OF_TYPE["gpt2"]
    with pytest.warns(UserWarning, match="^config.json: internal_version, is_llama_config") as said:
        assert read(config | changes) == read(config)
    assert len(said) == 1 and "unused" not in str(said[0].message)


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        ("qwen3", {"head_dim": None}, {"key_size": 64}),
        ("llama", {"rope_theta": None, "rope_scaling": None}, {"positions": Rotary()}),
        (
            "llama",
            {
                "rope_scaling": {"rope_type": "yarn", "factor": None},
                "original_max_position_embeddings": 512,
                "max_position_embeddings": 2048,
            },
            {"positions": Rotary(500_000.0, 1.0, Yarn(4.0, original_len=512))},
        ),
    ],
)
def test_null_means_what_earlier_versions_of_transformers_made_of_it(family, changes, fields):
    """Today's refuse it; other old keys are in tests/peers."""
    config = copy.deepcopy(OF_TYPE[family]) | changes
    assert {name: getattr(read(config), name) for name in fields} == fields


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scaled_positions_of_a_part_of_each_head_are_refused(family, inside):
    """They were computed, in Gemma 3 also for layers whose positions are not scaled."""
    part, scaling = {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0}
    changes = {"rope_scaling": scaling | part} if inside else {"rope_scaling": scaling} | part
    with pytest.raises(ConfigError, match="partial_rotary_factor=0.5"):
        read(copy.deepcopy(OF_TYPE[family]) | changes)


@pytest.mark.parametrize("changes", [{"dense_act_fn": "silu"}, {"is_gated_act": None}])
def test_keys_that_contradict_the_projection_of_a_t5_are_refused(changes):
    """transformers computes what they say; they were ignored."""
    config = copy.deepcopy(OF_TYPE["t5"])
    if "is_gated_act" in changes:
        changes = {"is_gated_act": "gated" not in config.get("feed_forward_proj", "relu")}
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.* does not fit"):
        read(config | changes)
