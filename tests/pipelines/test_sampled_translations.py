"""Random translations: drawn from the model's distribution, each by its own number."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import EmbeddingOptions, NormOptions, TransformerConfig
from jaxformer.decoding import GenerationConfig, SamplerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import Translation, sample_translations, score_pairs, translate
from jaxformer.text.tokenizers import BOS, EOS, PAD, UNK, train_characters

SEARCH = GenerationConfig(beam_size=1, max_extra_tokens=5, batch_size=7)
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


def drawn(system, lines, sampler=SamplerConfig(), search=SEARCH, **options):
    return sample_translations(*system[:2], lines, *system[2:], search, sampler, **options)


def test_a_line_is_drawn_by_its_number_and_the_seed_and_not_by_the_others(system):
    found = drawn(system, LINES, count=3)
    assert [len(line) for line in found] == [3, 3, 3, 3]
    assert found[1] == [Translation("", 0.0, [], [])] * 3
    assert len({tuple(x.ids) for x in found[2]}) > 1
    last = drawn(system, LINES[2:], count=3, first_example_id=2)
    for line, other in zip(found[2:], last, strict=True):
        assert [x.ids for x in line] == [x.ids for x in other]
        np.testing.assert_allclose([x.score for x in line], [x.score for x in other], rtol=1e-5)
    other = drawn(system, LINES, SamplerConfig(seed=1), count=3)
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
    greedy = translate(*system[:2], LINES, *system[2:], SEARCH)
    found = drawn(system, LINES, SamplerConfig(temperature=0))
    for line, other in zip(found, greedy, strict=True):
        ended = other[0].ids[-1:] == [EOS] and len(other[0].ids) < 6
        assert not ended or line[0].ids == other[0].ids
    rules = GenerationConfig(
        max_length=6, min_length=3, no_repeat_ngram_size=1, suppress_tokens=(PAD, BOS, UNK)
    )
    for line in drawn(system, LINES, search=rules, count=11):
        for ids in (x.ids for x in line if x.ids):
            assert 3 < len(ids) <= 6 or EOS not in ids
            assert len(set(ids)) == len(ids) and not set(ids) & {PAD, BOS, UNK}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "seed"])
def test_a_sampler_out_of_range_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        SamplerConfig(**{name: -1})
