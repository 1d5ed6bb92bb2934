"""The search settings of a folder of transformers."""

import json

import pytest

from jaxformer.decoding import GenerationConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained import load_eos, load_generation_config

MARIAN = {
    "vocab_size": 17,
    "decoder_vocab_size": 19,
    "pad_token_id": 18,
    "eos_token_id": 0,
    "decoder_start_token_id": 18,
    "bad_words_ids": [[18]],
    "forced_eos_token_id": 0,
    "num_beams": 6,
}


@pytest.fixture
def folder(tmp_path):
    def write(config, generation=None):
        for name, said in (("config.json", config), ("generation_config.json", generation)):
            if said is not None:
                (tmp_path / name).write_text(json.dumps(said))
        return tmp_path

    return write


def test_settings_are_those_of_config_json_where_nothing_else_is(folder):
    assert load_generation_config(folder(MARIAN)) == GenerationConfig(
        bos=18,
        eos=(0,),
        pad=18,
        at_max_length="force_eos_at_no_cost",
        suppress_tokens=(18,),
        beam_size=6,
        length_penalty=1.0,
        length_penalty_kind="power",
        early_stopping="heuristic",
        extra_candidates=1,
    )


def test_generation_config_json_says_more_and_comes_first(folder):
    later = {
        "eos_token_id": [1, 7],
        "forced_bos_token_id": 5,
        "suppress_tokens": [3, 4],
        "num_beams": 2,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "max_length": 20,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "min_length": 6,
        "min_new_tokens": 4,
        "bad_words_ids": None,
        "renormalize_logits": True,
    }
    config = {k: v for k, v in MARIAN.items() if k != "forced_eos_token_id"}
    assert load_generation_config(folder(config, later)) == GenerationConfig(
        bos=18,
        eos=(1, 7),
        pad=18,
        min_length=5,
        no_repeat_ngram_size=3,
        repetition_penalty=1.5,
        forced_bos=5,
        suppress_tokens=(3, 4),
        renormalize_logits=True,
        beam_size=2,
        length_penalty=0.5,
        length_penalty_kind="power",
        early_stopping="never",
        at_max_length="cut",
        extra_candidates=2,
        max_length=19,
    )
    found = load_generation_config(folder(config, later | {"max_new_tokens": 7}))
    assert found.max_length == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": None}, "eos_token_id=null, but it must be one id from 0 to 18"),
        ({"eos_token_id": [0, 19]}, "eos_token_id=19, but it must be one id from 0 to 18"),
        ({"eos_token_id": []}, r"eos_token_id=\[\], but it must be one id"),
        ({"eos_token_id": [0, 1]}, r"forced_eos_token_id=0, but eos_token_id=\[0, 1\]: give both"),
        ({"eos_token_id": [0, 18]}, "pad_token_id and eos_token_id are both 18"),
        ({"pad_token_id": 19}, "pad_token_id=19, but it must be one id from 0 to 18"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id=null"),
        ({"pad_token_id": 0}, "pad_token_id and eos_token_id are both 0"),
        ({"forced_eos_token_id": 4}, "forced_eos_token_id=4, but eos_token_id=0"),
        (
            {"bad_words_ids": [[1, 2]]},
            r"bad_words_ids=\[\[1, 2\]\], but only words of one token are",
        ),
        ({"bad_words_ids": [["a"]]}, 'bad_words_ids="a", but it must be one id'),
        ({"suppress_tokens": 3}, "suppress_tokens=3, but it must be a list of ids"),
        ({"early_stopping": "soon"}, "early_stopping='soon', but it must be true, false"),
        ({"length_penalty": -101}, "length_penalty=-101, but it must be from -100 to 100"),
        ({"length_penalty": "long"}, 'length_penalty="long", but it must be from -100 to 100'),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size=3 is not supported"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1, but it must be a whole number"),
        ({"max_length": 1}, "max_length=1, but it must be a whole number from 2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0, but it must be a whole number from 1"),
        ({"min_length": "long"}, 'min_length="long", but it must be a whole number'),
        ({"min_new_tokens": 0.5}, "min_new_tokens=0.5, but it must be a whole number"),
        ({"num_beam_groups": 2}, "num_beam_groups=2 is not supported"),
        ({"repetition_penalty": 0}, "repetition_penalty=0, but it must be above 0 and at most 100"),
        ({"repetition_penalty": True}, "repetition_penalty=true, but it must be above 0"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_key(changes, message, folder):
    with pytest.raises(ConfigError, match=message):
        load_generation_config(folder(MARIAN, changes))


@pytest.mark.parametrize(
    ("early", "exponent", "early_stopping"),
    [
        (False, 1.0, "heuristic"),
        (True, 1.0, "beam_full"),
        ("never", 0.5, "never"),
        ("never", 0.0, "heuristic"),
        ("never", -0.5, "heuristic"),
    ],
)
def test_a_search_stops_as_the_folder_says(early, exponent, early_stopping, folder):
    changes = {"early_stopping": early, "length_penalty": exponent}
    found = load_generation_config(folder(MARIAN, changes))
    assert (found.early_stopping, found.length_penalty) == (early_stopping, exponent)


def test_the_ids_that_end_a_text_are_one_several_or_not_stated(folder):
    gpt = {"vocab_size": 19}
    assert load_eos(folder(gpt)) is None
    assert load_eos(folder(gpt | {"eos_token_id": 3})) == (3,)
    assert load_eos(folder(gpt, {"eos_token_id": [3, 5]})) == (3, 5)
    with pytest.raises(ConfigError, match="eos_token_id=19, but it must be one id from 0 to 18"):
        load_eos(folder(gpt, {"eos_token_id": [3, 19]}))
