"""An ensemble is the mean of its members' probabilities, in one program."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer.config import Rotary
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.int8 import quantize
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.pipelines import (
    complete_with_details,
    score_pairs,
    translate_with_details,
)
from jaxformer.pipelines.batching import pad_right
from jaxformer.pipelines.ensemble import Ensemble, stack_members
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import BOS, EOS, PAD, train_characters
from tests.configs import small

CONFIG = small(
    vocab_size=29, num_encoder_layers=1, num_decoder_layers=1, max_len=37, embeddings__tied="none"
)
GPT = replace(CONFIG, num_encoder_layers=0, positions=Rotary())
LINES = ["abc", "", "jihgfedcba", "d", "cabbage"]
SETTINGS = SearchConfig(beam_size=3), TranslationOptions(max_extra_tokens=3, batch_size=7)


@pytest.fixture(scope="module")
def tokenizer():
    return train_characters(["abcdefghijklmnopqrstuvwxy"])


def ids_of(model):
    return [np.ones((2, 3), np.int32)] * (1 + isinstance(model, EncoderDecoder))


def members_of(random_params, model, count):
    """The parameters of `count` models around the same ones."""
    params, rng = random_params(model, *ids_of(model)), np.random.default_rng(3)

    def near(leaf):
        return leaf + 0.5 * rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return [jax.tree.map(near, params) for _ in range(count)]


@pytest.fixture(scope="module")
def members(random_params):
    return members_of(random_params, EncoderDecoder(CONFIG), 3)


@pytest.fixture(scope="module")
def ensemble(members):
    return Ensemble(EncoderDecoder(CONFIG)), stack_members(members)


@pytest.mark.long
def test_an_ensemble_of_a_model_with_itself_is_the_model(tokenizer, random_params, assert_equal):
    model = EncoderDecoder(replace(CONFIG, scan_layers=True))
    (params,) = members_of(random_params, model, 1)
    both = Ensemble(model), stack_members([params, params])
    found, alone = (
        translate_with_details(Loaded(*system, tokenizer), LINES, *SETTINGS)
        for system in (both, (model, params))
    )
    for line, other in zip(found, alone, strict=True):
        assert [x.ids for x in line] == [x.ids for x in other]
        assert_equal([x.score for x in line], [x.score for x in other])


def forced(model, members, tokenizer, lines, best):
    """The log-probability [M, B, T, V] of every token, given the source and the tokens before."""
    sources = pad_right([[*tokenizer.encode(line), EOS] for line in lines], len(lines), 11)
    targets = pad_right([[BOS, *ids] for ids in best], len(lines), 16)

    @jax.jit
    def call(params):
        logits = model.apply({"params": params}, sources, targets, sources != PAD)
        return jax.nn.log_softmax(logits)

    return np.asarray([call(params) for params in members], np.float64)


def test_each_step_of_a_search_has_the_mean_probability_of_the_members(
    members, ensemble, tokenizer, assert_equal
):
    model, lines = EncoderDecoder(CONFIG), [line for line in LINES if line]
    loaded = Loaded(*ensemble, tokenizer)
    found = [line[1] for line in translate_with_details(loaded, lines, *SETTINGS)]
    assert len({tuple(x.ids) for x in found}) > 1
    each = forced(model, members, tokenizer, lines, [x.ids for x in found])
    log_probs = np.log(np.exp(each).mean(axis=0))
    for row, hypothesis in zip(log_probs, found, strict=True):
        count = len(hypothesis.ids)
        assert_equal(hypothesis.log_probs, row[np.arange(count), hypothesis.ids])


def test_scores_of_given_targets_are_of_the_mean_too(members, ensemble, tokenizer, assert_equal):
    pairs = [("abc", "ba"), ("jih", "cabbage")]
    found = score_pairs(Loaded(*ensemble, tokenizer), pairs, batch_size=2)
    alone = (Loaded(ensemble[0].model, member, tokenizer) for member in members)
    each = [score_pairs(loaded, pairs, batch_size=2) for loaded in alone]
    for i in range(2):
        assert_equal(found[i], np.log(np.mean([np.exp(scores[i]) for scores in each], axis=0)))


@pytest.mark.long
def test_language_models_and_models_in_8_bits_decode_together(tokenizer, random_params):
    model = DecoderOnly(GPT)
    first, second = members_of(random_params, model, 2)
    settings = SamplingConfig(max_new_tokens=7), CompletionOptions(seed=5)
    same = Ensemble(model), stack_members([first, first])
    texts = ["abc", "jihgfed"]
    found = complete_with_details(Loaded(*same, tokenizer), texts, *settings)
    assert [x.ids for x in found] == [
        x.ids for x in complete_with_details(Loaded(model, first, tokenizer), texts, *settings)
    ]
    small = stack_members([quantize(model, params) for params in (first, second)])
    mixed = complete_with_details(Loaded(Ensemble(model), small, tokenizer), texts, *settings)
    assert [x.ids for x in mixed] != [x.ids for x in found]


def products(system, params):
    """The number of matrix products a decoding step has."""
    source, tokens = np.full((3, 5), 7), np.full((3, 2, 1), 5)

    def step(params):
        call = partial(system.apply, {"params": params})
        cache = call(source, max_length=11, num_beams=2, method="init_cache")
        return call(tokens, cache, method="decode_step")[0]

    return jax.jit(step).lower(params).as_text().count("stablehlo.dot_general")


def test_all_members_share_each_product_of_a_step(members, ensemble):
    assert products(*ensemble) == products(ensemble[0].model, members[0]) > 5


def test_members_of_other_shapes_are_refused_by_name(members):
    def shapes(**sizes):
        model = EncoderDecoder(replace(CONFIG, **sizes))
        return jax.eval_shape(model.init, jax.random.key(0), *ids_of(model))["params"]

    message = r"blocks_0/\S+ is float32\[.*13.* in member 1 and float32\[.*23.* in member 4"
    with pytest.raises(ConfigError, match=message):
        stack_members([*members, shapes(d_ff=23)])
    with pytest.raises(ConfigError, match=r"blocks_1/\S+ .*member 1"):
        stack_members([members[0], shapes(num_decoder_layers=2)])
    with pytest.raises(ConfigError, match="no member"):
        stack_members([])
    with pytest.raises(ConfigError, match="'hidden'"):
        Ensemble(EncoderDecoder(CONFIG)).apply({"params": members}, method="hidden")
