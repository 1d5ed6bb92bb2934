import importlib.machinery
import json
import math
import sys
import types
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from jaxformer.config import (
    TRANSFORMER_BASE,
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    Linear,
    NormOptions,
    Relative,
    Rotary,
    Sinusoidal,
    TransformerConfig,
    WindowOptions,
    Yarn,
    from_plain,
    to_plain,
)
from jaxformer.config.import_names import name_of
from jaxformer.errors import ConfigError

SMALL = TransformerConfig(vocab_size=17, d_model=12, d_ff=13, num_heads=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"initializer": "zeros"}, ["initializer='zeros'", "xavier, normal, scaled_normal"]),
        ({"dtype": "float16"}, ["dtype='float16'", "float32, bfloat16"]),
        ({"pooler": True}, ["pooler=True", "none, tanh, relu"]),
        ({"vocab_size": 50.0}, ["vocab_size=50.0 is a float", "an integer: give an integer"]),
        ({"d_ff": True}, ["d_ff=True is a bool", "give an integer"]),
        ({"head_dim": "4"}, ["head_dim='4' is a str", "an integer or None"]),
        ({"use_bias": 1}, ["use_bias=1 is a int", "give True or False"]),
        ({"vocab_size": 0}, ["vocab_size=0", "at least 1"]),
        ({"d_model": -3}, ["d_model=-3", "at least 1"]),
        ({"d_ff": 0}, ["d_ff=0", "at least 1"]),
        ({"num_heads": 0}, ["num_heads=0", "at least 1"]),
        ({"max_len": 0}, ["max_len=0", "at least 1"]),
        ({"head_dim": 0}, ["head_dim=0", "at least 1"]),
        ({"value_head_dim": -1}, ["value_head_dim=-1", "at least 1"]),
        ({"source_vocab_size": 0}, ["source_vocab_size=0", "at least 1"]),
        ({"num_decoder_layers": -1}, ["num_decoder_layers=-1", "at least 0"]),
        ({"num_heads": 5}, ["d_model=12", "num_heads=5", "give head_dim"]),
        ({"attention": AttentionOptions(2)}, ["num_heads=3", "num_kv_heads=2", "group"]),
        ({"positions": "rotary"}, ["positions='rotary' is a str", "it must be a PositionScheme"]),
        ({"norm": "rms"}, ["norm='rms' is a str", "NormOptions"]),
        ({"positions": Rotary(), "head_dim": 5}, ["head_dim=5 is odd", "give an even head_dim"]),
        ({"positions": Rotary(fraction=0.4)}, ["head_dim=4 with fraction=0.4: 1 is odd", "even"]),
        ({"positions": Sinusoidal(endpoint=True), "d_model": 9}, ["an even d_model", "d_model=9"]),
        ({"embeddings": EmbeddingOptions(zero_id=17)}, ["zero_id=17", "vocab_size=17", "below"]),
        ({"dropout_rate": 1.0}, ["dropout_rate=1.0, but it must be in [0, 1)"]),
        ({"source_vocab_size": 19}, ["source_vocab_size=19", "vocab_size=17", "tie 'output'"]),
        (
            {"source_vocab_size": 19, "embeddings": EmbeddingOptions(tied="inputs")},
            ["tied='inputs'", "source_vocab_size=19", "tie 'output'"],
        ),
    ],
)
def test_a_contradiction_is_refused_with_what_was_given_and_what_to_do(changes, words):
    with pytest.raises(ConfigError) as error:
        replace(SMALL, **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        (NormOptions, {"kind": "batch"}, ["kind='batch'", "layer, rms"]),
        (
            AttentionOptions,
            {"norm_over_heads": True},
            ["query_key_norm=False: give query_key_norm"],
        ),
        (
            NormOptions,
            {"placement": "middle"},
            ["placement='middle'", "pre, post, output, sandwich"],
        ),
        (NormOptions, {"eps": None}, ["eps=None is a NoneType", "give a number"]),
        (NormOptions, {"eps": math.nan}, ["eps=nan, but it must be finite"]),
        (Rotary, {"base": -1.0}, ["base=-1.0, but it must be above 0"]),
        (Rotary, {"base": math.inf}, ["base=inf, but it must be finite"]),
        (Rotary, {"scaling": "linear"}, ["scaling='linear' is a str", "give a NoScaling"]),
        (FeedForwardOptions, {"activation": "tanh"}, ["activation='tanh'", "relu", "gelu_tanh"]),
        (FeedForwardOptions, {"dropout_rate": 2.0}, ["dropout_rate=2.0, but it must be in [0, 1)"]),
        (EmbeddingOptions, {"tied": "some"}, ["tied='some'", "none, output, inputs, all"]),
        (EmbeddingOptions, {"num_types": -2}, ["num_types=-2", "at least 0"]),
        (AttentionOptions, {"num_kv_heads": 0}, ["num_kv_heads=0", "at least 1"]),
        (WindowOptions, {"full_every": 1}, ["full_every=1", "at least 2"]),
        (WindowOptions, {"full_every": 2}, ["full_every=2 chooses layers", "give the size"]),
        (AttentionOptions, {"softcap": 0.0}, ["softcap=0.0", "above 0"]),
        (AttentionOptions, {"dropout_rate": -0.1}, ["dropout_rate=-0.1, but it must be in [0, 1)"]),
        (Sinusoidal, {"layout": "half"}, ["layout='half'", "interleaved, halves"]),
        (Sinusoidal, {"offset": -1}, ["offset=-1", "at least 0"]),
        (Relative, {"buckets": 3}, ["buckets=3", "at least 4"]),
        (Relative, {"buckets": 8, "max_distance": 4}, ["max_distance=4", "buckets=8", "than 4"]),
        (Rotary, {"fraction": 1.5}, ["fraction=1.5, but it must be in (0, 1]"]),
        (Yarn, {"beta_slow": 40.0}, ["beta_fast=32.0 must be above beta_slow=40.0"]),
        (Yarn, {"attention_factor": -1.0}, ["attention_factor=-1.0", "at least 0"]),
        (Linear, {"factor": 0.5}, ["factor=0.5", "at least 1"]),
    ],
)
def test_a_part_refuses_a_wrong_value_by_itself(part, fields, words):
    with pytest.raises(ConfigError) as error:
        part(**fields)
    for word in words:
        assert word in str(error.value)


def test_numbers_of_numpy_are_numbers():
    fields = {"vocab_size": np.int64(19), "dropout_rate": np.float32(0.5), "use_bias": np.True_}
    config = replace(SMALL, **fields, norm=NormOptions(eps=1))
    assert config.vocab_size == 19 and config.dropout_rate == 0.5 and config.use_bias is True
    assert from_plain(TransformerConfig, json.loads(json.dumps(to_plain(config)))) == config


def test_sizes_left_out_follow_from_those_given():
    assert (SMALL.key_size, SMALL.value_size, SMALL.kv_heads) == (4, 4, 3)
    free = replace(SMALL, num_heads=5, head_dim=7, attention=AttentionOptions(num_kv_heads=1))
    assert (free.key_size, free.value_size, free.kv_heads) == (7, 7, 1)
    assert replace(free, value_head_dim=11).value_size == 11


def test_the_base_model_has_the_sizes_of_the_paper():
    c = TRANSFORMER_BASE
    assert (c.d_model, c.d_ff, c.num_heads, c.key_size, c.value_size) == (512, 2048, 8, 64, 64)
    assert (c.num_encoder_layers, c.num_decoder_layers, c.dropout_rate) == (6, 6, 0.1)


def test_a_config_is_a_value():
    assert replace(SMALL) == SMALL and hash(replace(SMALL)) == hash(SMALL)
    with pytest.raises(FrozenInstanceError):
        SMALL.d_model = 3


def test_an_activation_of_ones_own_is_recorded_by_its_name():
    config = replace(SMALL, feed_forward=FeedForwardOptions(softsign))
    plain = json.loads(json.dumps(to_plain(config)))
    assert plain["feed_forward"]["activation"] == f"{__name__}:softsign"
    assert from_plain(TransformerConfig, plain) == config
    with pytest.raises(ConfigError, match="cannot be found again by a name"):
        to_plain(FeedForwardOptions(lambda x: x))
    with pytest.raises(ConfigError, match="activation='tanh'"):
        FeedForwardOptions("tanh")


@pytest.mark.parametrize("file", ["/home/somebody/my_program.py", None])
def test_a_part_of_a_program_without_a_name_is_refused_with_how_to_start_it(file, monkeypatch):
    main = types.ModuleType("__main__")
    main.__spec__ = None
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    part = type("Mine", (), {"__module__": "__main__"})
    advice = "defined in the program" if file is None else "python -m my_program,"
    with pytest.raises(ConfigError, match=f"block=.*Mine.*{advice}"):
        name_of(part, "block")
    main.__spec__ = importlib.machinery.ModuleSpec("somebody.my_program", None)
    assert name_of(part, "block") == "somebody.my_program:Mine"


def softsign(x):
    return x / (1 + abs(x))


def test_the_base_of_the_position_schemes_is_no_scheme_to_choose():
    plain = to_plain(SMALL)
    with pytest.raises(ConfigError, match="'position_scheme'"):
        from_plain(TransformerConfig, plain | {"positions": {"type": "position_scheme"}}, "model")
    with pytest.raises(ConfigError) as refusal:
        from_plain(TransformerConfig, plain | {"positions": {"type": "rotory"}}, "model")
    assert "rotary" in str(refusal.value) and "position_scheme" not in str(refusal.value)
    scaled = replace(SMALL, positions=Rotary())
    assert from_plain(TransformerConfig, to_plain(scaled), "model") == scaled
