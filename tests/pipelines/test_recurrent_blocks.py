"""A block with a recurrent state between blocks that attend: its cache cannot be truncated."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer as jf
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, beam_search
from jaxformer.nn.blocks import Block
from jaxformer.nn.cache import LayerState
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines import make_step_fn, stream
from jaxformer.text.tokenizers import train_characters
from tests.configs import small

WIDTH = 14
PROMPTS = ["abcab", "ka", "hgf edc bak jihg fed cab", "ab", "ba", "  cabcd", "f"]
SAMPLING = SamplingConfig(max_new_tokens=7, temperature=1.5)
CONFIG = small(
    vocab_size=16,
    d_model=WIDTH,
    num_heads=2,
    head_dim=6,
    num_decoder_layers=3,
    max_len=53,
    norm__placement="pre",
    positions=jf.Rotary(),
)


class State(LayerState):
    """The recurrent state [B, W, D] of a layer, which forgets nothing that it has read."""

    state: jax.Array


class RecurrentBlock(Block):
    """x + h with h_t = 0.8 h_{t-1} + tanh(x_t), before the feed-forward network."""

    def states(self, x, first):
        def step(h, x):
            h = 0.8 * h + jnp.tanh(x)
            return h, h

        last, states = jax.lax.scan(step, first, x.swapaxes(0, 1))
        return last, states.swapaxes(0, 1)

    def __call__(self, x, mask=None, **inputs):
        _, states = self.states(x, jnp.full_like(x[:, 0], 0.5))
        return self.after_attention(x, states, None, None, None)

    def init_cache(self, batch_size, num_beams, max_length, d_model):
        return State(jnp.full((batch_size, num_beams, d_model), 0.5))

    def decode(self, x, layer_cache, mask, **inputs):
        first = layer_cache.state
        last, states = self.states(x, first.reshape(-1, x.shape[-1]))
        y = self.after_attention(x, states, None, None, None)
        return y, layer_cache.replace(state=last.reshape(first.shape))


def make_block(layer=None, **fields):
    """The first and every second block is recurrent: a stack of two classes."""
    kind = RecurrentBlock if layer % 2 == 0 else Block
    return kind(layer=layer, **fields)


@pytest.fixture(scope="module")
def loaded(random_params):
    model = DecoderOnly(CONFIG, block=make_block)
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    return jf.Loaded(model, params, train_characters(["abcdefghijk "]))


@partial(jax.jit, static_argnums=0)
def all_log_probs(model, params, tokens):
    return jax.nn.log_softmax(model.apply({"params": params}, tokens))


def expected_log_probs(loaded, prompt, ids):
    """The log-probability of each of `ids` by the whole forward pass.

    Zeros after them, which no earlier token sees, give all texts one length and one program.
    """
    read = [*prompt, *ids]
    tokens = np.zeros((1, 41), np.int32)
    tokens[0, : len(read)] = read
    log_probs = np.asarray(all_log_probs(loaded.model, loaded.params, tokens))[0]
    places = range(len(prompt) - 1, len(read) - 1)
    return np.array([log_probs[place, id] for place, id in zip(places, ids, strict=True)])


def test_a_cache_with_a_recurrent_layer_says_that_it_cannot_be_truncated(loaded):
    cache = loaded.model.init_cache(2, max_length=5)
    assert not cache.can_truncate
    assert DecoderOnly(CONFIG).init_cache(2, max_length=5).can_truncate


def test_prompts_of_other_lengths_are_read_without_padding(loaded, assert_equal):
    found = jf.complete_with_details(loaded, PROMPTS, SAMPLING)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = loaded.tokenizer.encode(prompt)
        assert_equal(completion.log_probs, expected_log_probs(loaded, ids, completion.ids))
    pieces = dict.fromkeys(range(len(PROMPTS)), "")
    for number, piece in stream(loaded, PROMPTS, SAMPLING):
        pieces[number] += piece
    assert [*pieces.values()] == [completion.text for completion in found]


def test_a_text_that_slides_begins_with_an_empty_state_again(loaded, assert_equal):
    short = dataclasses.replace(loaded.model.config, max_len=12)
    model = loaded.model.clone(config=short)
    options = CompletionOptions(overflow="slide", eos=())
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=11, suppress_tokens=(2,))
    (found,) = jf.complete_with_details(
        dataclasses.replace(loaded, model=model), ["abcab ka"], sampling, options
    )
    prompt = loaded.tokenizer.encode("abcab ka")
    whole = [*prompt, *found.ids]
    assert len(found.ids) == 11
    # Each round of 6 tokens sees the last 6 before it.
    for begun in (0, 6):
        end = len(prompt) + begun
        ids = found.ids[begun : begun + 6]
        expected = expected_log_probs(loaded, whole[end - 6 : end], ids)
        assert_equal(found.log_probs[begun : begun + 6], expected)


def test_continuations_are_scored_without_padding(loaded, assert_equal):
    questions = [("abc", ["ka", "b"]), ("hgf edc", ["bak", "k", "ab"])]
    for (context, continuations), scores in zip(
        questions, jf.score_continuations(loaded, questions), strict=True
    ):
        ids = loaded.tokenizer.encode(context)
        for continuation, each in zip(continuations, scores, strict=True):
            assert each.ids == loaded.tokenizer.encode(continuation)
            context_ids = [loaded.tokenizer.special.bos, *ids]
            assert_equal(each.log_probs, expected_log_probs(loaded, context_ids, each.ids))


class Texts(NamedTuple):
    """The plain twin of a cache: the tokens [B, W, L] of each beam, all of which are read anew."""

    tokens: jax.Array
    length: int | jax.Array

    def reorder_beams(self, parents):
        tokens = jnp.take_along_axis(self.tokens, parents[..., None], axis=1)
        return self._replace(tokens=tokens)


def search_without_cache(model, params, first, limits, search):
    """The beams of texts that are read from their beginning for each token."""

    def step(tokens, texts):
        batch, beams, room = texts.tokens.shape
        written = texts.tokens.at[:, :, texts.length].set(tokens)
        logits = model.apply({"params": params}, written.reshape(-1, room))
        logits = logits[:, texts.length].reshape(batch, beams, -1)
        return logits, Texts(written, texts.length + 1)

    room = jnp.zeros((len(first), search.beam_size, search.max_new_tokens), jnp.int32)
    return beam_search(step, Texts(room, jnp.int32(0)), first, limits, search)


def test_beams_move_their_recurrent_states(loaded, assert_equal):
    model, first, limits = loaded.model, jnp.array([4, 9]), jnp.array([6, 5])
    search = SearchConfig(beam_size=3, max_new_tokens=6, eos=(2,))

    @jax.jit
    def both(params):
        cache = model.init_cache(2, max_length=6, num_beams=3)
        found = beam_search(make_step_fn(model, params), cache, first, limits, search)
        return found, search_without_cache(model, params, first, limits, search)

    found, expected = both(loaded.params)
    assert np.array_equal(found.tokens, expected.tokens)
    assert_equal(found.log_probs, expected.log_probs)


def test_the_members_of_an_ensemble_have_states_of_their_own(loaded, assert_equal):
    members = [loaded.params, jax.tree.map(lambda leaf: 0.7 * leaf, loaded.params)]
    both = dataclasses.replace(
        loaded, model=jf.Ensemble(loaded.model), params=jf.stack_members(members)
    )
    prompts = PROMPTS[:3]
    found = jf.complete_with_details(both, prompts, SAMPLING)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = loaded.tokenizer.encode(prompt)
        each = [
            expected_log_probs(dataclasses.replace(loaded, params=member), ids, completion.ids)
            for member in members
        ]
        assert_equal(completion.log_probs, np.log(np.mean(np.exp(each), axis=0)))


class Mixing(nn.Module):
    """A block that has none of the fields of `Block`, and keeps nothing."""

    @nn.compact
    def __call__(self, x, mask=None, **inputs):
        return x + nn.Dense(x.shape[-1])(x)

    def decode(self, x, layer_cache, mask, **inputs):
        return self(x), layer_cache


def test_a_stack_of_blocks_of_two_classes_decodes_in_jit(random_params, assert_equal):
    def make_block(layer=None, **fields):
        return Mixing() if layer == 1 else Block(layer=layer, **fields)

    config = dataclasses.replace(CONFIG, positions=jf.Sinusoidal())
    model, tokens = DecoderOnly(config, block=make_block), jnp.array([[4, 5, 7], [9, 8, 4]])
    variables = {"params": random_params(model, tokens)}

    @jax.jit
    def decode(tokens):
        cache = model.apply(variables, 2, max_length=5, method="init_cache")
        logits, _ = model.apply(variables, tokens[:, None], cache, method="decode_step")
        return logits[:, 0]

    assert_equal(decode(tokens), model.apply(variables, tokens))
