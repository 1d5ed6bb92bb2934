"""Keys of config.json mean here what they mean in `transformers`. Run with `-m peer`."""

import copy
import dataclasses
import warnings

import pytest

from jaxformer.pretrained import family as reading
from jaxformer.pretrained.families import FAMILIES, find
from tests.pretrained.published_configs import PUBLISHED, reason

pytestmark = pytest.mark.peer

EQUAL = (("silu", "swish"), (False, None))
OURS_ALONE = {
    "rope_theta",  # in their rope_parameters
    "rope_local_base_freq",
    "rotary_emb_base",
    "rotary_pct",
    "tie_word_embeddings",  # theirs tie any T5; its scaled outputs are a key of their own
    "n_inner",  # theirs keep null
    "position_embedding_type",  # refused, because earlier versions read it
    "is_decoder",
    "n_positions",
    "scale_decoder_outputs",
}
OLD_AND_NEW = [
    ("gpt2", {"n_head": 12, "num_attention_heads": 6}),
    ("t5", {"d_kv": 64, "head_dim": 32}),
    ("bart", {"encoder_layers": 12, "num_hidden_layers": 3, "hidden_size": 512}),
    ("distilbert", {"dim": 768, "hidden_size": 384}),
    ("qwen2", {"num_key_value_heads": None}),
    ("mistral", {"head_dim": None}),
    ("llama", {"rope_theta": None, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}),
    ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}),
    ("llama", {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    (
        "llama",
        {
            "rope_scaling": {"type": "linear", "factor": 3.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        },
    ),
    (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    ),
    ("gpt_neox", {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "relu"}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (
        "gemma3_text",
        {
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 5.0,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7.0}},
        },
    ),
]


@pytest.fixture(scope="module")
def classes(transformers):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def assert_means_what_theirs_does(classes, config):
    family, _ = find(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = reading.read_config(family, config)
    theirs = classes[family.model_type].from_dict(copy.deepcopy(config))
    written = {key: value for one in family.keys for key, value in one.write(ours).items()}
    for key, value in written.items():
        wanted = getattr(theirs, key, "absent")
        if key == "rope_parameters":
            wanted = {name: wanted.get(name, value[name]) for name in value}
        if key not in OURS_ALONE:
            assert value == wanted or (value, wanted) in EQUAL, key


def test_published_models_are_read_as_theirs_read_them(classes):
    for name, config in PUBLISHED.items():
        if reason(name) is None:
            assert_means_what_theirs_does(classes, config)


@pytest.mark.parametrize(("family", "changes"), OLD_AND_NEW, ids=str)
def test_old_keys_beside_new_mean_what_theirs_make_of_them(classes, family, changes):
    config = next(x for x in PUBLISHED.values() if x["model_type"] == family)
    assert_means_what_theirs_does(classes, config | changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_key_that_their_class_reads_is_known_here(classes, name):
    family, theirs = FAMILIES[name], classes[name]
    known = {name for key in family.keys for name in key.names} | family.ignored_keys
    known |= {*reading._IGNORED_KEYS, *reading._REFUSED_KEYS, *family.aliases}
    keys = {field.name for field in dataclasses.fields(theirs)} | {*theirs.attribute_map}
    assert keys - known == set()
    # Of two names for one number we may write another one than they do.
    theirs_alike, ours_alike = (
        {frozenset(names) for names in aliases.items()}
        for aliases in (theirs.attribute_map, family.aliases)
    )
    assert theirs_alike == ours_alike
