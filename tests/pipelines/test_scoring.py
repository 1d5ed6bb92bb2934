"""Likelihoods, filled masks and vectors: against the models' own forward passes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.inspection import Patched
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pipelines import (
    embed,
    embed_with_details,
    embeddings,
    fill_mask,
    fill_mask_with_details,
    score_with_details,
)
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import (
    MASKED_SPECIAL_TOKENS,
    train_bpe,
    train_characters,
    train_words,
)
from tests.configs import small

SENTENCES = [
    "the bank lends money",
    "the boat leaves the river bank",
    "money",
    "the river lends the boat money the bank leaves",
]
CONFIG = small(
    vocab_size=19,
    d_model=14,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=23,
    norm__placement="pre",
    embeddings__tied="output",
)


@pytest.fixture(scope="module")
def words():
    """Twelve ids: five special tokens and seven words."""
    return train_words(SENTENCES, 100, special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def decoder(random_params):
    model = DecoderOnly(CONFIG)
    return model, random_params(model, jnp.ones((2, 3), jnp.int32))


@pytest.fixture(scope="module")
def masked(random_params):
    model = MaskedLanguageModel(CONFIG)
    return model, random_params(model, jnp.ones((2, 3), jnp.int32))


@partial(jax.jit, static_argnames=("model", "method"))
def run(model, params, *inputs, method=None):
    return model.apply({"params": params}, *inputs, method=method)


def encoder(model, *inputs):
    return model.encoder(*inputs)


def log_prob(decoder, ids, token):
    """The log-probability of `token` after `ids`, by the whole, padded forward pass."""
    padded = np.zeros((1, 23), np.int32)
    padded[0, : len(ids)] = ids
    logits = np.asarray(run(*decoder, padded), np.float64)[0, len(ids) - 1]
    return logits[token] - np.log(np.exp(logits).sum())


def test_a_likelihood_is_the_sum_of_the_log_probabilities_after_the_begin_token(
    decoder, words, assert_equal
):
    texts = [*SENTENCES, "", "river\nboat\n"]
    found = score_with_details(Loaded(*decoder, words), texts)
    for text, result in zip(texts, found, strict=True):
        ids = [words.special.bos, *words.encode(text)]
        expected = sum(log_prob(decoder, ids[:t], ids[t]) for t in range(1, len(ids)))
        assert_equal(result.nats, -expected)
        assert result.tokens == len(ids) - 1 and result.bytes == len(text)
    assert [result.words for result in found] == [4, 6, 1, 9, 0, 4]
    assert found[4][:2] == (0.0, 0) and found[0].perplexity == math.exp(found[0].nats / 4)
    alone = score_with_details(Loaded(*decoder, words), texts[1:2])[0]
    assert_equal(alone.nats, found[1].nats)


@pytest.mark.parametrize("stride", [None, 1, 7, 22, 23])
def test_a_long_text_is_read_in_windows_and_each_token_counted_once(
    decoder, words, assert_equal, stride
):
    texts = [" ".join(SENTENCES) + " boat", " ".join(SENTENCES * 3), "money " * 22, "boat " * 23]
    found = score_with_details(Loaded(*decoder, words), texts, stride=stride)
    for text, result in zip(texts, found, strict=True):
        ids = [words.special.bos, *words.encode(text)]
        expected = 0.0
        for t in range(1, len(ids)):
            start = max(0, math.ceil((t - 23) / (stride or 23))) * (stride or 23)
            expected += log_prob(decoder, ids[start:t], ids[t])
        assert result.tokens == len(ids) - 1
        assert_equal(result.nats, -expected)


def test_without_a_begin_token_the_first_token_is_not_counted(decoder, assert_equal):
    bare = train_characters(["abcdef"], special_tokens=())
    found = score_with_details(Loaded(*decoder, bare), ["abc", "f", ""])
    ids = bare.encode("abc")
    expected = log_prob(decoder, ids[:1], ids[1]) + log_prob(decoder, ids[:2], ids[2])
    assert_equal(found[0].nats, -expected)
    assert [result.tokens for result in found] == [2, 0, 0]


def test_a_stride_outside_the_window_is_refused(decoder, words):
    for stride in (0, 24, 2.5):
        with pytest.raises(ConfigError, match=f"stride={stride}"):
            score_with_details(Loaded(*decoder, words), ["boat"], stride=stride)


def test_candidates_are_the_models_probabilities_at_each_mask(masked, words, assert_equal):
    texts = ["the <mask> lends money", "<mask>", "<mask> boat <mask> the river <mask>"] * 2
    found = fill_mask_with_details(Loaded(*masked, words), texts, count=100)
    assert [len(text) for text in found] == [1, 1, 3] * 2
    for text, masks in zip(texts, found, strict=True):
        ids = [words.special.bos, *words.encode_inputs([text])[0], words.special.eos]
        logits = np.asarray(run(*masked, np.array([ids]))[0], np.float64)[0, :, : words.vocab_size]
        places = [t for t, token in enumerate(ids) if token == words.special.mask]
        for t, candidates in zip(places, masks, strict=True):
            shares = np.exp(logits[t]) / np.exp(logits[t]).sum()
            order = np.argsort(-shares)
            assert [words.id_of(candidate.token) for candidate in candidates] == order.tolist()
            assert_equal([candidate.probability for candidate in candidates], shares[order])
            assert abs(sum(candidate.probability for candidate in candidates) - 1.0) < 1e-6
    assert len(fill_mask_with_details(Loaded(*masked, words), texts)[0][0]) == 5
    assert {c.text for c in found[1][0]} >= {"boat", "money", ""}


def bpe(prefix):
    lines = ["the cat sat on the mat"] * 3
    return train_bpe(lines, 300, prefix=prefix, special_tokens=MASKED_SPECIAL_TOKENS)


@pytest.mark.parametrize(
    "tokenizer, text, whole",
    [
        # The space before a word is in the word's own token, here and in text without masks.
        (bpe(""), "the <mask> sat on the<mask>", ["the", None, " sat", " on", " the", None]),
        (bpe(" "), "the <mask> sat <mask>", ["the", None, " sat", None]),
        (
            train_words(SENTENCES, 99, special_tokens=MASKED_SPECIAL_TOKENS),
            "the <mask> lends",
            ["the", None, "lends"],
        ),
        (
            train_characters(["a b"], special_tokens=(*MASKED_SPECIAL_TOKENS,)),
            "a <mask>b",
            ["a", " ", None, "b"],
        ),
        (
            train_characters(["ab "], special_tokens=("<mask>",)),
            "<mask><mask> b",
            [None, None, " ", "b"],
        ),
    ],
    ids=["bytes", "bytes after a space", "words", "characters", "nothing but characters"],
)
def test_a_mask_stands_where_the_token_of_a_word_would(tokenizer, text, whole):
    (ids,) = tokenizer.encode_inputs([text])
    assert [i == tokenizer.special.mask for i in ids] == [part is None for part in whole]
    parts = [part for part in whole if part is not None]
    kept = [i for i in ids if i != tokenizer.special.mask]
    assert [tokenizer.decode([i]).strip() or " " for i in kept] == [p.strip() or " " for p in parts]


@pytest.mark.parametrize("count", [0, 2.5, "5"])
def test_a_count_that_is_no_positive_integer_is_refused(masked, words, count):
    with pytest.raises(ConfigError, match=f"count={count!r}"):
        fill_mask_with_details(Loaded(*masked, words), ["a <mask>"], count=count)


def test_a_text_whose_masks_cannot_be_filled_is_refused(masked, words):
    with pytest.raises(DataError, match="text 2"):
        fill_mask(Loaded(*masked, words), ["<mask>", "the boat"])
    with pytest.raises(DataError, match="mask token"):
        fill_mask(Loaded(*masked, train_words(SENTENCES, 100)), ["<mask>"])
    with pytest.raises(
        DataError,
        match="max_len=23 .*text 2",
    ):
        fill_mask(Loaded(*masked, words), ["<mask>", "<mask>" + " boat" * 21])


@pytest.fixture(scope="module", params=[MaskedLanguageModel, EncoderOnly, DecoderOnly])
def any_model(request, random_params):
    model = request.param(CONFIG)
    return model, random_params(model, jnp.ones((2, 3), jnp.int32))


def test_a_word_in_two_sentences_has_one_learned_and_two_contextual_vectors(any_model, words):
    lends, leaves = embed_with_details(Loaded(*any_model, words), SENTENCES[:2])
    causal = isinstance(any_model[0], DecoderOnly)
    names = [" the", " bank", " lends", " money"]
    assert lends.tokens == (names if causal else ["<bos>", *names, "<eos>"])
    one, other = lends.tokens.index(" bank"), leaves.tokens.index(" bank")
    assert np.array_equal(lends.learned[one], leaves.learned[other])
    assert np.abs(lends.contextual[one] - leaves.contextual[other]).max() > 0.1
    assert not np.array_equal(lends.learned[0], lends.learned[1])


def test_vectors_are_the_models_own_and_that_of_a_text_their_mean(any_model, words, assert_equal):
    model, params = any_model
    causal = isinstance(model, DecoderOnly)
    texts = SENTENCES if causal else [*SENTENCES, ""]
    for text, found in zip(
        texts, embed_with_details(Loaded(*any_model, words), texts), strict=True
    ):
        ids = words.encode(text)
        if causal:
            (expected,) = jax.device_get(run(model, params, np.array([ids]), method="hidden"))
        else:
            ids = [words.special.bos, *ids, words.special.eos]
            method = encoder if isinstance(model, MaskedLanguageModel) else None
            output = run(model, params, np.array([ids]), method=method)
            (expected,) = jax.device_get(output).hidden
        assert_equal(found.contextual, expected)
        assert_equal(found.vector, np.mean(expected, axis=0))
        tree = params["encoder"] if isinstance(model, MaskedLanguageModel) else params
        rows = tree["embedding"]["table"][np.array(ids)]
        assert_equal(found.learned, rows * math.sqrt(14))
        assert found.learned.dtype == found.contextual.dtype == np.float32
        assert found.tokens == [words.token(i) for i in ids]
    loaded = Loaded(*any_model, words)
    for mode, i in (("cls", 0), ("lasttoken", -1)):
        assert_equal(
            embed(loaded, texts, pooling=mode)[1],
            embed_with_details(loaded, texts[1]).contextual[i],
        )


def test_a_text_that_has_no_vectors_is_refused(masked, decoder, words):
    with pytest.raises(DataError, match="text 2 of 2"):
        embed(Loaded(*decoder, words), ["boat", " "])
    with pytest.raises(
        DataError,
        match="max_len=23 .*text 1",
    ):
        embed(Loaded(*masked, words), ["boat " * 22])
    assert len(embed_with_details(Loaded(*decoder, words), ["boat " * 23])[0].tokens) == 23
    with pytest.raises(ConfigError, match="pooling='first'"):
        embed(Loaded(*masked, words), "boat", pooling="first")
    with pytest.raises(ConfigError, match="prompt='query'"):
        embed(Loaded(*masked, words), "boat", prompt="query")


def test_a_patched_model_scores_and_embeds_as_the_model_without_its_head(decoder, words):
    model, params = decoder
    name = "decoder/blocks_0/attention/heads"
    patched = Patched(model, {name: lambda x: x.at[:, :, 1].set(0.0)})
    without = jax.tree.map(np.copy, params)
    without["decoder"]["blocks_0"]["attention"]["out"]["kernel"][1] = 0.0
    both = (patched, params), (model, without)
    found, expected = (score_with_details(Loaded(*one, words), SENTENCES) for one in both)
    assert [x.nats for x in found] == pytest.approx([x.nats for x in expected], rel=1e-5)
    assert found[0].nats != pytest.approx(
        score_with_details(Loaded(*decoder, words), SENTENCES)[0].nats, rel=1e-3
    )
    vectors = (embed_with_details(Loaded(*one, words), SENTENCES) for one in both)
    for ours, theirs in zip(*vectors, strict=True):
        np.testing.assert_allclose(ours.contextual, theirs.contextual, atol=1e-4)


def test_texts_are_batched_with_those_of_similar_length_in_few_shapes(rng):
    lengths = rng.integers(1, 510, 211).tolist() + [3] * 97
    batches = list(embeddings._batches(lengths, 509))
    assert sorted(i for chosen, _ in batches for i in chosen) == list(range(len(lengths)))
    for chosen, size in batches:
        of_batch = [lengths[i] for i in chosen]
        assert len(chosen) <= 32 and size <= 509
        assert max(of_batch) <= size <= max(max(of_batch) * 5 / 4, 8)
        assert min(of_batch) * 2 + 16 >= max(of_batch)
    assert len({size for _, size in batches}) < 20
