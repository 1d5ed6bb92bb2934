"""What a folder says of special ids and of searching, and the search that it asks for."""

import json

import pytest

from jaxformer.config import ConfigError
from jaxformer.decoding import (
    as_it_stands,
    at_the_limit,
    ends_for_nothing,
    first_full,
    is_cut,
    no_better,
    power,
    renormalized,
)
from jaxformer.generation import manner_of
from jaxformer.pretrained import Conventions, load_conventions

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


def test_conventions_are_those_of_config_json_where_nothing_else_is(folder):
    assert load_conventions(folder(MARIAN)) == Conventions(
        start=18, end=0, pad=18, ends_at_limit=True, banned=(18,), width=6
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
    assert load_conventions(folder(config, later)) == Conventions(
        start=18,
        end=1,
        more_ends=(7,),
        least=5,
        unrepeated=3,
        repetition=1.5,
        pad=18,
        first=5,
        banned=(3, 4),
        renormalize=True,
        width=2,
        length_penalty=0.5,
        early_stopping="never",
        longest=19,
    )
    assert load_conventions(folder(config, later | {"max_new_tokens": 7})).longest == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": None}, "eos_token_id=null, but it must be one id from 0 to 18"),
        ({"eos_token_id": [0, 19]}, "eos_token_id=19, but it must be one id from 0 to 18"),
        ({"eos_token_id": []}, r"eos_token_id=\[\], but it must be one id"),
        ({"eos_token_id": [0, 1]}, r"forced_eos_token_id=0 is not eos_token_id=\[0, 1\]: a text"),
        ({"eos_token_id": [0, 18]}, "pad_token_id and eos_token_id are both 18"),
        ({"pad_token_id": 19}, "pad_token_id=19, but it must be one id from 0 to 18"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id=null"),
        ({"pad_token_id": 0}, "pad_token_id and eos_token_id are both 0"),
        ({"forced_eos_token_id": 4}, "forced_eos_token_id=4 is not eos_token_id=0"),
        ({"bad_words_ids": [[1, 2]]}, r"bad_words_ids=\[\[1, 2\]\], but only words of one token"),
        ({"bad_words_ids": [["a"]]}, 'bad_words_ids="a", but it must be one id'),
        ({"suppress_tokens": 3}, "suppress_tokens=3 is no list"),
        ({"early_stopping": "soon"}, "early_stopping='soon', but it must be true, false"),
        ({"length_penalty": -101}, "length_penalty=-101 must be from -100 to 100"),
        ({"length_penalty": "long"}, 'length_penalty="long" must be from -100 to 100'),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size=3 is not known here"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1, but it must be a whole number"),
        ({"max_length": 1}, "max_length=1, but it must be a whole number from 2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0, but it must be a whole number from 1"),
        ({"min_length": "long"}, 'min_length="long", but it must be a whole number'),
        ({"min_new_tokens": 0.5}, "min_new_tokens=0.5, but it must be a whole number"),
        ({"num_beam_groups": 2}, "num_beam_groups=2 is not known here"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0 and at most 100"),
        ({"repetition_penalty": True}, "repetition_penalty=true must be above 0"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_key(changes, message, folder):
    with pytest.raises(ConfigError, match=message):
        load_conventions(folder(MARIAN, changes))


GREEDY = Conventions(start=3, end=1, pad=0)


def test_one_hypothesis_is_greedy_and_cut_at_its_limit():
    manner = manner_of(GREEDY)
    assert (manner.start, manner.end, manner.pad, manner.rules()) == (3, 1, 0, [])
    assert (manner.stop, manner.limit, manner.twice) == (first_full, is_cut, False)


def test_what_repeats_is_penalised_in_the_logits_of_one_and_the_log_probabilities_of_several():
    said = {"repetition": 1.5, "unrepeated": 2, "least": 3, "more_ends": (2,)}
    one, several = (manner_of(GREEDY._replace(width=width, **said)) for width in (1, 4))
    assert (one.logit_repetition, one.repetition) == (1.5, 1.0)
    assert (several.logit_repetition, several.repetition) == (1.0, 1.5)
    assert [len(way.rules()) for way in (one, several)] == [2, 3]
    assert [len(way.logit_rules()) for way in (one, several)] == [1, 0]
    assert one.ends == several.ends == (1, 2)


@pytest.mark.parametrize(
    ("early", "exponent", "stop", "outlook"),
    [
        (False, 1.0, no_better, as_it_stands),
        (True, 1.0, first_full, as_it_stands),
        ("never", 0.5, no_better, at_the_limit),
        ("never", 0.0, no_better, as_it_stands),
    ],
)
def test_several_hypotheses_stop_as_the_folder_says(early, exponent, stop, outlook):
    said = {"width": 4, "early_stopping": early, "length_penalty": exponent}
    manner = manner_of(GREEDY._replace(**said, ends_at_limit=True, banned=(2,), first=5))
    assert manner_of(GREEDY._replace(renormalize=True)).rules() == [renormalized]
    assert (manner.stop, manner.outlook) == (stop, outlook)
    assert (manner.penalty, manner.limit, manner.twice) == (power, ends_for_nothing, True)
    assert (manner.banned, manner.first, len(manner.rules())) == ((2,), 5, 2)
