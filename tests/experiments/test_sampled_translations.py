"""Random translations: drawn from the model's distribution, and ranked by their risk."""

import itertools
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from experiments.translation.sampled_translations import (
    expected_utilities,
    rank_by_utility,
    sample_translations,
    sentence_utility,
)
from jaxformer.config import EmbeddingOptions, NormOptions, TransformerConfig
from jaxformer.decoding import SamplerConfig, SearchConfig, TranslationOptions
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import Translation, score_pairs, translate
from jaxformer.text.tokenizers import BOS, EOS, PAD, UNK, train_characters

WORDS = "der die das Hund Vogel Baum sieht mag".split()
SETTINGS = SearchConfig(beam_size=1), TranslationOptions(max_extra_tokens=5, batch_size=7)
LINES = ["abc", "", "ccbacb", "b"]


@pytest.fixture(scope="module")
def system(random_params):
    """(model, params, tokenizer, tokenizer); PAD, BOS and UNK are hardly ever drawn."""
    tokenizer = train_characters(["abc"])
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=14,
        d_ff=22,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_len=23,
        norm=NormOptions(placement="pre"),
        embeddings=EmbeddingOptions(tied="none"),
    )
    model, ids = EncoderDecoder(config), jnp.ones((2, 3), jnp.int32)
    params = random_params(model, ids, ids)
    norm, kernel = params["decoder"]["final_norm"], params["output"]["kernel"]
    norm["scale"][0], norm["bias"][0] = 0.0, 10.0
    kernel[0] = 0.0
    kernel[0, [PAD, BOS, UNK]] = -3.0
    return model, params, tokenizer, tokenizer


@pytest.fixture(scope="module")
def many(system):
    """3,072 samples of one line."""
    return drawn(system, ["abc"], count=3_072)[0]


def drawn(system, lines, sampler=SamplerConfig(), settings=SETTINGS, **numbers):
    return sample_translations(*system[:2], lines, *system[2:], *settings, sampler, **numbers)


def test_a_line_is_drawn_by_its_number_and_the_seed_and_not_by_the_others(system):
    found = drawn(system, LINES, count=3)
    assert [len(line) for line in found] == [3, 3, 3, 3]
    assert found[1] == [Translation("", 0.0, [], [])] * 3
    assert len({tuple(x.ids) for x in found[2]}) > 1
    last = drawn(system, LINES[2:], count=3, first_example_id=2)
    for line, other in zip(found[2:], last, strict=True):
        assert [x.ids for x in line] == [x.ids for x in other]
        np.testing.assert_allclose([x.score for x in line], [x.score for x in other], rtol=1e-5)
    other = drawn(system, LINES, seed=1, count=3)
    assert [x.ids for line in other for x in line] != [x.ids for line in found for x in line]


def test_the_shares_of_short_translations_are_their_probabilities(system, many):
    """Chi-square over the texts of one letter and all others."""
    short = [letter for letter in "abc"]
    scores = score_pairs(*system[:2], [("abc", text) for text in short], *system[2:])
    probs = np.exp([sum(x) for x in scores])
    counts = Counter(x.text for x in many if len(x.ids) == 2)
    observed = np.array([counts[text] for text in short])
    expected = np.append(probs, 1 - probs.sum()) * 3_072
    observed = np.append(observed, 3_072 - observed.sum())
    assert expected.min() > 5
    assert np.sum((observed - expected) ** 2 / expected) < 16.3  # p = 0.001 at 3 degrees


def test_the_log_probabilities_are_those_of_scoring(system, many, assert_equal):
    ended = [x for x in many[:64] if x.text and x.ids[-1] == EOS]
    ended = [x for x in ended if x.ids[:-1] == system[2].encode(x.text)]
    assert len(ended) > 5
    pairs = [("abc", x.text) for x in ended]
    for sample, forced in zip(ended, score_pairs(*system[:2], pairs, *system[2:]), strict=True):
        assert_equal(sample.log_probs, forced)
        assert_equal(sample.score, sum(forced))


def test_temperature_0_is_greedy_search_and_settings_of_the_search_hold(system):
    greedy = translate(*system[:2], LINES, *system[2:], *SETTINGS)
    found = drawn(system, LINES, SamplerConfig(temperature=0))
    for line, other in zip(found, greedy, strict=True):
        ended = other[0].ids[-1:] == [EOS] and len(other[0].ids) < 6
        assert not ended or line[0].ids == other[0].ids
    rules = SearchConfig(
        max_new_tokens=6, min_new_tokens=3, no_repeat_ngram_size=1, suppress_tokens=(PAD, BOS, UNK)
    )
    for line in drawn(system, LINES, settings=(rules, SETTINGS[1]), count=11):
        for ids in (x.ids for x in line if x.ids):
            assert 3 < len(ids) <= 6 or EOS not in ids
            assert len(set(ids)) == len(ids) and not set(ids) & {PAD, BOS, UNK}


def overlap(hypothesis, reference):
    """Asymmetric on purpose: the share of the hypothesis' letters in the reference."""
    return sum(letter in reference for letter in hypothesis) / max(len(hypothesis), 1)


def sampled(texts):
    return [Translation(text, -1.0, [i], [-1.0]) for i, text in enumerate(texts)]


@pytest.fixture
def texts(rng):
    """17 sentences; some are equal."""
    distinct = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(11)]
    return [distinct[i] for i in rng.integers(0, 11, 17)]


@pytest.mark.parametrize("name", ["chrf", "bleu"])
def test_the_expected_utility_is_the_mean_over_all_pairs_of_samples(texts, name, assert_equal):
    score = {
        "chrf": lambda h, r: sacrebleu.sentence_chrf(h, [r]).score,
        "bleu": lambda h, r: sacrebleu.sentence_bleu(h, [r], use_effective_order=True).score,
    }[name]
    table = np.array([score(h, r) for h, r in itertools.product(texts, texts)]).reshape(17, 17)
    assert len(set(texts)) < 17 and table.min() < 50 < table.max()
    assert_equal(expected_utilities(texts, sentence_utility(name)), table.mean(axis=1))


def test_the_first_argument_of_a_utility_is_the_hypothesis(assert_equal):
    assert_equal(expected_utilities(["ab", "abcd"], overlap), [1.0, 0.75])


def test_distinct_samples_are_ranked_by_utility_and_ties_by_the_order_of_drawing(texts):
    found = rank_by_utility(sampled(texts), sentence_utility("chrf"))
    values = expected_utilities(texts, sentence_utility("chrf"))
    assert sorted(x.text for x in found) == sorted(set(texts))
    assert found[0].text == texts[int(np.argmax(values))]
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    assert all(x.score == values[x.ids[0]] and texts.index(x.text) == x.ids[0] for x in found)
    for order in ([3, 0, 2, 1], [1, 3, 2, 0]):
        tied = [texts[i] for i in dict.fromkeys(order)]
        assert [x.text for x in rank_by_utility(sampled(tied), lambda h, r: 1.0)] == list(
            dict.fromkeys(tied)
        )


def test_one_sample_and_an_empty_one_have_a_utility():
    assert [x.text for x in rank_by_utility(sampled([""]), sentence_utility("chrf"))] == [""]
    assert expected_utilities(["", "", "a b"], sentence_utility("bleu"))[2] > 0
