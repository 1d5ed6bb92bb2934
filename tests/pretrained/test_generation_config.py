"""The search settings of a folder of transformers."""

import json
from dataclasses import replace

import pytest

from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.pretrained import (
    generation_json,
    inexpressible_settings,
    load_eos,
    load_generation_config,
    load_sampling_config,
)

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
STATED = {key: value for key, value in MARIAN.items() if not key.endswith("vocab_size")}
FOLLOWED = SearchConfig(
    eos=(1, 7),
    min_new_tokens=5,
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
    max_new_tokens=19,
)


@pytest.fixture
def folder(tmp_path):
    def write(config, generation=None):
        for name, said in (("config.json", config), ("generation_config.json", generation)):
            if said is not None:
                (tmp_path / name).write_text(json.dumps(said))
        return tmp_path

    return write


def test_settings_are_those_of_config_json_where_nothing_else_is(folder):
    search, options = load_generation_config(folder(MARIAN))
    assert options == TranslationOptions(bos=18, pad=18)
    assert search == SearchConfig(
        eos=(0,),
        at_max_length="force_eos_at_no_cost",
        suppress_tokens=(18,),
        beam_size=6,
        length_penalty=1.0,
        length_penalty_kind="power",
        early_stopping="heuristic",
        extra_candidates=1,
    )


def test_settings_in_config_json_do_not_count_beside_generation_config_json(folder):
    later = {
        "pad_token_id": 18,
        "decoder_start_token_id": 18,
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
        "renormalize_logits": True,
    }
    search, options = load_generation_config(folder(MARIAN, later))
    assert (options.bos, options.pad) == (18, 18)
    assert search == FOLLOWED
    search, _ = load_generation_config(folder(MARIAN, later | {"max_new_tokens": 7}))
    assert search.max_new_tokens == 7


def test_min_new_tokens_replaces_min_length(folder):
    for fewest in (0, 4):
        lengths = {"min_length": 9, "min_new_tokens": fewest}
        search, _ = load_generation_config(folder(MARIAN | lengths))
        assert search.min_new_tokens == fewest


def test_bad_words_that_end_a_text_are_no_bad_words(folder):
    words = {"eos_token_id": [1, 7], "bad_words_ids": [[7], [18], [5], [1]], "suppress_tokens": [1]}
    search, _ = load_generation_config(folder(MARIAN | words | {"forced_eos_token_id": None}))
    assert search.suppress_tokens == (18, 5, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": None}, "eos_token_id=null"),
        ({"eos_token_id": [0, 19]}, "eos_token_id=19.* 0 to 18"),
        ({"eos_token_id": []}, r"eos_token_id=\[\]"),
        ({"eos_token_id": [0, 18]}, r"eos_token_id=\[0, 18\], pad_token_id=18"),
        ({"forced_eos_token_id": 4}, r"eos_token_id=\[0\], .*forced_eos_token_id=\[4\]"),
        ({"pad_token_id": [1, 2]}, r"pad_token_id=\[1, 2\]"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id=null"),
        ({"bad_words_ids": [[1, 2]]}, r"bad_words_ids=\[\[1, 2\]\]"),
        ({"bad_words_ids": [["a"]]}, 'bad_words_ids="a"'),
        ({"early_stopping": "soon"}, 'early_stopping="soon"'),
        ({"length_penalty": "long"}, "length_penalty='long'"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_length": "long"}, 'min_length="long"'),
        ({"num_beam_groups": 2}, "num_beam_groups=2"),
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config="),
        ({"do_sample": True, "temperature": 0.7}, "do_sample=true"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_key(changes, message, folder):
    with pytest.raises(ConfigError, match=message):
        load_generation_config(folder(MARIAN, STATED | changes))


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
    search, _ = load_generation_config(folder(MARIAN, STATED | changes))
    assert (search.early_stopping, search.length_penalty) == (early_stopping, exponent)


def test_the_ids_that_end_a_text_are_one_several_or_not_stated(folder):
    gpt = {"vocab_size": 19}
    assert load_eos(folder(gpt)) is None
    assert load_eos(folder(gpt | {"eos_token_id": 3})) == (3,)
    assert load_eos(folder(gpt, {"eos_token_id": [3, 5]})) == (3, 5)
    assert load_eos(folder(gpt | {"eos_token_id": 3}, {"max_length": 9})) is None
    with pytest.raises(ConfigError, match="eos_token_id=19"):
        load_eos(folder(gpt, {"eos_token_id": [3, 19]}))


@pytest.mark.parametrize("at_max_length", ["cut", "force_eos_at_no_cost"])
def test_settings_that_are_written_are_read_again(folder, at_max_length):
    settings = replace(FOLLOWED, eos=(7,), early_stopping="beam_full", extra_candidates=1)
    settings = replace(settings, at_max_length=at_max_length, max_new_tokens=11)
    assert inexpressible_settings(settings) == []
    ids = {"decoder_start_token_id": 18, "pad_token_id": 17, "bos_token_id": None}
    written = generation_json(settings, 23, ids)
    options = TranslationOptions(bos=18, pad=17)
    assert load_generation_config(folder(MARIAN, written)) == (settings, options)
    plain = SearchConfig(
        length_penalty_kind="power", at_max_length="cut", max_new_tokens=11, extra_candidates=1
    )
    written = generation_json(plain, 23, ids)
    assert load_generation_config(folder(MARIAN, written)) == (plain, options)


def test_settings_without_a_counterpart_are_named():
    names = ["length_penalty_kind", "extra_candidates", "at_max_length", "max_new_tokens"]
    found = inexpressible_settings(SearchConfig())
    assert [each.partition("=")[0] for each in found] == names
    options = CompletionOptions(stop=("x",), overflow="slide")
    found = inexpressible_settings(SamplingConfig(), options)
    assert found == ["stop=('x',)", "overflow='slide'"]
    assert generation_json(SearchConfig(), 23, {})["max_new_tokens"] == 22


def test_sampling_is_written_as_transformers_names_it():
    config = SamplingConfig(
        max_new_tokens=7, temperature=0.5, top_k=3, min_p=0.1, no_repeat_ngram_size=2
    )
    assert generation_json(config, 23, {"eos_token_id": [3, 4], "pad_token_id": None}) == {
        "do_sample": True,
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 2,
        "eos_token_id": [3, 4],
    }
    greedy = generation_json(SamplingConfig(temperature=0.0), 23, {"eos_token_id": 2})
    assert not greedy["do_sample"] and "temperature" not in greedy and greedy["eos_token_id"] == 2


GPT2 = {"model_type": "gpt2", "vocab_size": 17, "eos_token_id": 1}


def test_lengths_of_a_decoder_count_the_prompt_unless_they_are_of_new_tokens(folder):
    sampling, options = load_sampling_config(folder(GPT2, {"max_length": 11, "min_length": 5}), 23)
    assert (options.max_length, options.min_length, sampling.min_new_tokens) == (11, 5, 0)
    both = {"max_length": 11, "min_length": 5, "max_new_tokens": 7, "min_new_tokens": 3}
    sampling, options = load_sampling_config(folder(GPT2, both), 23)
    assert (options.max_length, options.min_length) == (None, 0)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"bad_words_ids": [[2, 3]]}, "bad_words_ids"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p"),
        ({"do_sample": True, "epsilon_cutoff": 0.1}, "epsilon_cutoff"),
        ({"forced_bos_token_id": 3}, "forced_bos_token_id"),
        ({"forced_eos_token_id": 1}, "forced_eos_token_id"),
    ],
)
def test_what_a_decoder_cannot_follow_is_refused_by_its_key(settings, key, folder):
    with pytest.raises(ConfigError, match=key):
        load_sampling_config(folder(GPT2, settings), 23)
