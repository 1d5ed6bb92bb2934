"""Strings in, strings out: with a tiny random model, what the library promises of each line."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jaxformer.config import EmbeddingOptions, Learned, NormOptions, TransformerConfig
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.distributed import single
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import (
    Translation,
    encode_sources,
    find_too_long,
    max_target_length,
    score_pairs,
    translate,
    translate_with_details,
)
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import BOS, EOS, PAD, UNK, Tokenizer, train_characters

LETTERS = "abcdefghijk "
SEARCH = SearchConfig(beam_size=3)
OPTIONS = TranslationOptions(max_extra_tokens=3, batch_size=7)
BLANK = [Translation("", 0.0, [], [])]


@pytest.fixture(scope="module")
def system(random_params):
    """(model, params, source tokenizer, target tokenizer): random, but never <pad> or <bos>."""
    tokenizer = train_characters([LETTERS])
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=14,
        d_ff=22,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_len=37,
        norm=NormOptions(placement="pre"),
        embeddings=EmbeddingOptions(tied="none"),
    )
    model = EncoderDecoder(config)
    ids = jnp.ones((2, 3), jnp.int32)
    params = random_params(model, ids, ids)
    # Feature 0 is constant, and speaks against the tokens that stand for no text.
    norm, kernel = params["decoder"]["final_norm"], params["output"]["kernel"]
    norm["scale"][0], norm["bias"][0] = 0.0, 10.0
    kernel[0] = 0.0
    kernel[0, [PAD, BOS, UNK]] = -3.0
    return model, params, tokenizer, tokenizer


def test_a_source_stands_between_the_tokens_of_the_tokenizers_template_or_before_eos(system):
    model, _, tokenizer, _ = system
    a, b = tokenizer.encode("ab")
    library = copy.deepcopy(tokenizer.library_tokenizer)
    around = [(tokenizer.token(index), index) for index in (BOS, EOS)]
    library.post_processor = TemplateProcessing(
        single=["<bos>", "$A", "<eos>"], special_tokens=around
    )
    bart = Tokenizer(library)
    assert encode_sources(model, ["ab", " "], bart) == [[BOS, a, b, EOS], []]
    assert find_too_long(model, ["a" * 36, "a" * 35], bart) == [0]
    others = [(), (SearchConfig(eos=(EOS, 5)),), (SEARCH, TranslationOptions(bos=EOS))]
    for settings in others:
        assert encode_sources(model, ["ab", " "], tokenizer, *settings) == [[a, b, EOS], []]
    with pytest.raises(DataError, match=r"eos=\(2,\) and pad=3"):
        encode_sources(model, ["ab"], tokenizer, SEARCH, TranslationOptions(pad=UNK))


def run(system, lines, search=SEARCH, options=OPTIONS):
    return translate_with_details(Loaded(*system), lines, search, options)


def random_lines(rng, count, longest=15):
    """Lines that are not blank, of 1 to `longest` letters."""
    letters = list(LETTERS.strip())
    return ["".join(rng.choice(letters, rng.integers(1, longest + 1))) for _ in range(count)]


def assert_same(found, expected, assert_equal):
    assert [[h.ids for h in line] for line in found] == [[h.ids for h in line] for line in expected]
    assert [[h.text for h in line] for line in found] == [
        [h.text for h in line] for line in expected
    ]
    for line, other in zip(found, expected, strict=True):
        assert_equal([h.score for h in line], [h.score for h in other])
        for h, o in zip(line, other, strict=True):
            assert_equal(h.log_probs, o.log_probs)


def test_blank_lines_give_one_empty_translation_and_every_line_keeps_its_place(
    system, assert_equal
):
    lines = ["abc", "", "  \t ", "kjihgfedcba", "\u2028", "d"]
    found = run(system, lines)
    assert [found[i] for i in (1, 2, 4)] == [BLANK] * 3
    full = [i for i, line in enumerate(lines) if line.strip()]
    assert all(len(found[i]) == 3 and found[i][0].ids for i in full)
    alone = [run(system, [lines[i]] * 3)[1] for i in full]
    assert_same([found[i] for i in full], alone, assert_equal)


def test_nothing_but_blank_lines_needs_no_model(system):
    assert run(system, ["", " "]) == [BLANK, BLANK]


def test_batches_of_1_7_and_64_in_any_order_give_the_same_hypotheses(system, rng, assert_equal):
    lines = random_lines(rng, 23)
    assert len(set(map(len, lines))) > 7
    by_size = [
        run(system, lines, options=dataclasses.replace(OPTIONS, batch_size=n)) for n in (64, 7, 1)
    ]
    assert len({tuple(line[0].ids) for line in by_size[0]}) > 7, "the model must heed its input"
    assert_same(by_size[1], by_size[0], assert_equal)
    assert_same(by_size[2], by_size[0], assert_equal)
    order = rng.permutation(23)
    shuffled = run(system, [lines[i] for i in order])
    assert_same(shuffled, [by_size[0][i] for i in order], assert_equal)


def test_each_bucket_of_lengths_has_two_compiled_pieces(system, rng, compiled):
    settings = SearchConfig(beam_size=2), dataclasses.replace(OPTIONS, max_extra_tokens=2)
    lines = random_lines(rng, 23) + ["a" * 17, "b" * 23, "c" * 30]
    run(system, lines, *settings)
    assert compiled == [4], "up to 16 ids, and up to 32"
    run(system, lines[::-1], *settings)
    run(system, lines[3:], *settings)
    assert compiled == [4]


def test_parameters_of_a_program_with_a_mesh_and_read_ones_share_one_program(system, compiled):
    model, params, *tokenizers = system
    from_a_step = single().init(lambda: jax.tree.map(jnp.asarray, params))
    run((model, jax.tree.map(jax.device_put, params), *tokenizers), ["a bad cab"])
    before = compiled[0]
    run((model, from_a_step, *tokenizers), ["a bad cab"])
    assert compiled == [before]


def test_hypotheses_are_distinct_end_once_in_the_order_of_their_scores_as_scoring_gives_them(
    system, rng, assert_equal
):
    lines = random_lines(rng, 13)
    pairs, expected = [], []
    for line, found in zip(lines, run(system, lines), strict=True):
        assert len({tuple(h.ids) for h in found}) == SEARCH.beam_size
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for hypothesis in found:
            assert len(hypothesis.ids) == len(hypothesis.log_probs)
            assert len(hypothesis.ids) <= len(line) + 1 + OPTIONS.max_extra_tokens
            assert hypothesis.ids.index(EOS) == len(hypothesis.ids) - 1
            assert hypothesis.text == system[3].decode(hypothesis.ids)
            if hypothesis.text.strip():
                pairs.append((line, hypothesis.text))
                expected.append(hypothesis.log_probs)
    assert len(pairs) > 23
    found = score_pairs(Loaded(*system), pairs, batch_size=7)
    for forced, log_probs in zip(found, expected, strict=True):
        assert_equal(forced, log_probs)


def test_the_score_of_a_pair_does_not_depend_on_the_others(system, assert_equal):
    pairs = [("abc", "hgf"), ("", "abc"), ("kkkkkk", "a" * 20), ("abc", "\t"), ("d", "ab")]
    found = score_pairs(Loaded(*system), pairs, batch_size=7)
    assert [len(log_probs) for log_probs in found] == [4, 0, 21, 0, 3]
    assert max(max(log_probs) for log_probs in found if log_probs) < 0.0
    for i in (0, 4):
        assert_equal(score_pairs(Loaded(*system), [pairs[i]], batch_size=7)[0], found[i])


def test_the_probabilities_of_all_short_targets_add_up_to_less_than_one(system):
    """A forced log-probability is that of the very tokens: one letter and the end, of 12."""
    pairs = [("abc", letter) for letter in LETTERS.strip()]
    found = score_pairs(Loaded(*system), pairs, batch_size=7)
    assert sum(np.exp(log_probs[0]) for log_probs in found) < 1.0
    assert len({log_probs[0] for log_probs in found}) == len(pairs)


def test_a_line_of_max_len_ids_is_taken_and_a_longer_one_is_refused_with_its_number(system):
    lines = ["a" * 36, "", "b" * 37, "c" * 41]
    assert len(encode_sources(system[0], lines[:1], system[2])[0]) == 37
    message = r"2 of 4 texts are longer than max_len=37 tokens, the first is text 3 with 38: split"
    with pytest.raises(DataError, match=message):
        run(system, lines)
    with pytest.raises(DataError, match="text 2 "):
        score_pairs(Loaded(*system), [("a", "b"), ("a", lines[3])])
    assert find_too_long(system[0], lines, system[2]) == [2, 3]
    assert find_too_long(system[0], [" " * 99], system[2]) == [], "a blank line is never too long"


def test_learned_positions_end_a_translation_at_max_len(random_params, system):
    config = dataclasses.replace(system[0].config, positions=Learned(), max_len=11)
    model, ids = EncoderDecoder(config), jnp.ones((2, 3), jnp.int32)
    params = random_params(model, ids, ids)
    search = SearchConfig(beam_size=1)
    found = translate_with_details(Loaded(model, params, *system[2:]), ["abcdefghij", "k"], search)
    assert all(1 <= len(line[0].ids) <= 11 for line in found)
    assert max_target_length(config, 11, search) == 11
    assert max_target_length(system[0].config, 11, search) == 61


@pytest.mark.parametrize("side", [0, 1])
def test_pairs_are_not_scored_by_a_tokenizer_with_more_ids_than_the_model(system, side):
    model, params, *tokenizers = system
    tokenizers[side] = train_characters([LETTERS + "lmno"])
    with pytest.raises(ConfigError, match="20 ids"):
        score_pairs(Loaded(model, params, *tokenizers), [("abc", "d")])


def test_special_ids_of_a_tokenizer_that_are_not_the_models_are_refused(system):
    bare = train_characters([LETTERS], special_tokens=())
    other = train_characters([LETTERS], special_tokens=("<unk>", "<pad>", "<eos>"))
    late = train_characters([LETTERS], special_tokens=("<pad>", "<eos>", "<unk>"))
    for tokenizer, ids in ((bare, "EOS None"), (other, "EOS 2 and padding 1"), (late, "EOS 1")):
        with pytest.raises(DataError, match=rf"eos=\(2,\) and pad=0, .*{ids}"):
            translate_with_details(Loaded(*system[:2], tokenizer), ["abc"])


def test_ids_and_lengths_that_the_model_cannot_have_are_refused(system):
    with pytest.raises(ConfigError, match="bos=16"):
        run(system, ["abc"], options=TranslationOptions(bos=16))
    with pytest.raises(ConfigError, match="min_new_tokens=6"):
        run(system, ["abcde", "a"], SearchConfig(min_new_tokens=6, at_max_length="cut"))
    with pytest.raises(ConfigError, match=" 5 tokens"):
        run(system, ["abcde", "a"], SearchConfig(min_new_tokens=5))
    for name, value in (("batch_size", 0), ("max_extra_tokens", -1), ("bos", 1.5)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            TranslationOptions(**{name: value})


@pytest.mark.parametrize("pair", ["ab", ("a",), ("a", "b", "c")])
def test_what_is_no_pair_is_refused(system, pair):
    with pytest.raises(DataError, match="pair 2 of 2"):
        score_pairs(Loaded(*system), [("a", "b"), pair])


def test_ids_beyond_the_tokenizer_are_never_written_and_logits_that_are_nan_are_said(
    random_params, system
):
    config = dataclasses.replace(system[0].config, vocab_size=19)
    model, ids = EncoderDecoder(config), jnp.ones((2, 3), jnp.int32)
    params = random_params(model, ids, ids)
    params["output"]["kernel"][0, 16:] = 20.0
    norm = params["decoder"]["final_norm"]
    norm["scale"][0], norm["bias"][0] = 0.0, 10.0
    loaded = Loaded(model, params, *system[2:])
    found = translate_with_details(loaded, ["abc", "d"], beam_size=2)
    assert all(max(each.ids) < 16 for line in found for each in line)
    params["output"]["kernel"][:] = np.nan
    with pytest.warns(UserWarning, match="NaN"):
        found = translate_with_details(loaded, ["abc", "d"], beam_size=2, max_new_tokens=5)
    assert all(np.isnan(each.score) for line in found for each in line)


def test_a_translation_that_is_cut_gets_no_eos_where_eos_is_the_id_of_padding_too(system):
    """Its ids are followed by zeros."""
    model, params, *tokenizers = system
    bare = train_characters([LETTERS], special_tokens=("<eos>", "<pad>", "<unk>", "<bos>"))
    output = params["output"]["kernel"].copy()
    output[0] = 0.0
    output[0, [0, 1, 2, 3]] = -9.0
    loaded = Loaded(model, params | {"output": {"kernel": output}}, bare)
    cut = {"at_max_length": "cut", "eos": (0,), "pad": 1, "bos": 3, "max_new_tokens": 5}
    found = translate_with_details(loaded, ["abc", "k"], beam_size=2, **cut)
    assert all(len(each.ids) == 5 and 0 not in each.ids for line in found for each in line)


def test_calls_of_mixed_settings_and_lengths_compile_few_programs(system, rng, compiled):
    loaded = Loaded(*system)
    for _ in range(43):
        settings = {
            "length_penalty": float(rng.choice([0.0, 0.6, 1.0])),
            "min_new_tokens": int(rng.integers(0, 3)),
            "max_new_tokens": [None, int(rng.integers(4, 60))][rng.integers(2)],
            "max_extra_tokens": int(rng.integers(4, 50)),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
        }
        lines = random_lines(rng, rng.integers(1, 12), longest=30)
        assert len(translate(loaded, lines, beam_size=2, **settings)) == len(lines)
    assert compiled[0] <= 12


def test_a_logits_processor_of_the_callers_decides_what_is_written(system, assert_equal):
    lines, loaded = ["abc", "k", "hgf edc"], Loaded(*system)
    (first, *_), *_ = translate_with_details(loaded, lines, SEARCH, OPTIONS)
    forbidden = first.ids[0]

    def without(logits, history):
        return logits.at[forbidden].set(-jnp.inf)

    found = translate_with_details(loaded, lines, SEARCH, OPTIONS, logits_processors=[without])
    expected = translate_with_details(loaded, lines, SEARCH, OPTIONS, suppress_tokens=(forbidden,))
    for hypotheses, others in zip(found, expected, strict=True):
        assert [each.ids for each in hypotheses] == [each.ids for each in others]
        assert all(forbidden not in each.ids for each in hypotheses)
        assert_equal([each.score for each in hypotheses], [each.score for each in others])
    best = translate(loaded, lines, SEARCH, OPTIONS, logits_processors=[without])
    assert best == [hypotheses[0].text for hypotheses in found]


def test_a_second_call_of_the_same_sizes_traces_nothing(system):
    traced = []

    class Counted(EncoderDecoder):
        def init_cache(self, *args, **options):
            traced.append(args)
            return super().init_cache(*args, **options)

    model, params, *tokenizers = system
    counted = Counted(model.config), params, *tokenizers
    first = run(counted, ["abc", "de"])
    assert traced
    traced.clear()
    assert run(counted, ["abc", "de"]) == first
    assert traced == []
