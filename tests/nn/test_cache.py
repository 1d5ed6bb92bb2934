"""The cache against its plain twin, which gathers the tokens of each beam."""

import runpy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import AttentionOptions
from jaxformer.decoding import put_rows, take_rows
from jaxformer.errors import ConfigError
from jaxformer.nn import cache as cache_module
from jaxformer.nn.cache import LayerCache, LayerState
from jaxformer.nn.models import DecoderOnly
from tests.configs import small

B, W, S, L = 2, 3, 5, 11

BASE = small(d_model=24, num_heads=4, num_decoder_layers=1)


def test_a_cache_may_have_another_number_of_beams_after_reordering(rng):
    """From W to more, then to fewer; each goes on with its ancestors' tokens, read from the cache.

    The keys and values of a token are its number alone, so that what is read names its tokens.
    """
    config = replace(BASE, num_heads=2, head_dim=3)
    cache, texts, count = DecoderOnly(config).empty_cache(B, W, L), np.zeros((B, W, 0), int), 0
    for parents in ([[2, 0, 0, 1], [1, 1, 2, 0]], [[3, 1], [0, 2]], [[1, 1, 0], [0, 1, 1]]):
        written = count + 1 + np.arange(B * cache.num_beams * 2)
        count = written.max()
        written = written.reshape(B, -1, 2)
        cache, *read = extended(cache, written, np.array(parents))
        texts = np.concatenate([texts, written], axis=2)
        texts = np.take_along_axis(texts, np.array(parents)[:, :, None], axis=1)
        assert cache.num_beams == len(parents[0]) and cache.max_length == L
        assert np.array_equal(seen_by_each(texts.shape[2], *read), texts)


def test_a_token_after_an_ended_sentence_has_the_last_position_of_the_table():
    cache = DecoderOnly(BASE).empty_cache(B, 1, L).truncate(jnp.array([L - 1, 4]))
    assert np.array_equal(cache.positions(2), [[L - 1, L - 1], [4, 5]])


@pytest.mark.parametrize(("batch", "heads"), [(3, 2), (3, 1), (2, 1)])
def test_sentences_move_between_caches_whatever_axes_are_left_out(batch, heads):
    """A cache of one sentence has no axis for it, nor one with one key head for the heads."""
    options = AttentionOptions(num_kv_heads=heads)
    config = replace(BASE, attention=options)
    whole, one = (
        DecoderOnly(config).empty_cache(n, W, L).truncate(jnp.zeros(n, int)) for n in (batch, 1)
    )
    one = jax.tree.map(lambda x: x + 1, one)
    put = put_rows(whole, np.array([1]), one)
    assert jax.tree.map(jnp.shape, put) == jax.tree.map(jnp.shape, whole)
    sums = [float(jnp.abs(take_rows(put, np.array([n])).layers[0].key).mean()) for n in (0, 1)]
    assert sums == [0.0, 1.0]
    back = take_rows(put, np.array([1]))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, one)))
    outside = put_rows(whole, np.array([batch]), one)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, outside, whole)))


def test_sentences_of_a_new_cache_are_repeated_and_enter_with_lengths_of_their_own():
    cache = DecoderOnly(BASE).empty_cache(2, 1, L)
    assert take_rows(cache, np.array([1, 1, 0])).layers[0].key.shape[0] == 3
    with pytest.raises(ValueError, match="0 is a number.*cache.truncate"):
        put_rows(cache, np.array([0]), DecoderOnly(BASE).empty_cache(1, 1, L))


@jax.jit
def extended(cache, tokens, parents):
    """A cache whose keys and values are numbers throughout, re-ordered, and what a token reads."""
    shape = tokens.shape[0] * tokens.shape[1], tokens.shape[2]
    new = jnp.broadcast_to(jnp.float32(tokens).reshape(*shape, 1, 1), (*shape, 2, 3))
    layer = cache.layers[0].write(new, -new, cache.length)
    cache = cache.advance((layer,), tokens.shape[2]).reorder_beams(parents)
    return cache, cache.layers[0].read(), cache.mask_of_beams(cache.mask(), 1).explicit


def seen_by_each(length, kv, mask):
    """The numbers [B, W, length] of the tokens that the next one of each beam may see."""
    assert np.array_equal(kv[0], -kv[1])
    written = length * (mask.shape[2] // L)  # the next token's own place comes after these
    pairs, keys = np.array(mask)[:, :, :written], np.array(kv[0])[:, :written, 0, 0]
    return np.array([[row[seen] for seen in each] for row, each in zip(keys, pairs, strict=True)])


class Numbers(LayerState):
    """A state of two arrays with different numbers of axes."""

    first: jax.Array
    second: jax.Array


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_state_of_ones_own_moves_with_its_beams_and_its_sentences(is_stacked, rng):
    """Beside keys and values in one layer; in a loop over layers the arrays are stacked."""
    config = replace(BASE, num_decoder_layers=2, scan_layers=is_stacked)
    axis = 1 if is_stacked else 0  # of the sentences

    def filled(lengths):
        cache = DecoderOnly(config).empty_cache(B, W, L).truncate(jnp.array(lengths))
        shape = (2, B, W) if is_stacked else (B, W)
        own = (Numbers(rng.random(shape), rng.random((*shape, 2, 3))) for _ in cache.layers)
        layers = zip(own, cache.layers, strict=True)
        return cache.replace(layers=tuple({"own": own, "kv": kv} for own, kv in layers))

    cache, new = filled([3, 4]), filled([5, 6])
    parents, rows = np.array([[2, 0, 0, 1], [1, 1, 2, 0]]), np.array([1, 0, 1])
    moved, taken = cache.reorder_beams(parents), take_rows(cache, rows)
    put = put_rows(cache, np.array([1, B]), new)  # the second of `new` goes nowhere
    assert (moved.num_beams, moved.slots, moved.can_truncate) == (4, 4, False)
    assert (taken.length.tolist(), put.length.tolist()) == ([4, 3, 4], [3, 5])
    for layer in range(len(cache.layers)):
        assert moved.layers[layer]["kv"].slots == 4
        for name in ("first", "second"):
            before, other, *after = (
                np.moveaxis(getattr(each.layers[layer]["own"], name), axis, 0)
                for each in (cache, new, moved, taken, put)
            )
            of_beams = [np.take(x, beams, axis) for x, beams in zip(before, parents, strict=True)]
            expected = np.stack(of_beams), before[rows], np.stack([before[0], other[0]])
            for found, right in zip(after, expected, strict=True):
                np.testing.assert_allclose(found, right, rtol=1e-6)


def test_an_array_that_does_not_know_how_beams_move_is_refused():
    cache = DecoderOnly(BASE).empty_cache(B, W, L).replace(layers=(jnp.zeros((B, 5)),))
    for use in (lambda: cache.reorder_beams(jnp.zeros((B, W), int)), lambda: cache.can_truncate):
        with pytest.raises(ConfigError, match="Array.*LayerState"):
            use()


def test_reordering_beams_moves_no_keys(rng):
    keys, values = rng.standard_normal((2, B, S, 2, 3), np.float32)
    encoder_kv = LayerCache.create(keys, values)
    cache = (
        DecoderOnly(BASE).empty_cache(B, W, L).replace(encoder_kv=(encoder_kv,), length=np.int32(4))
    )
    selected = cache.reorder_beams(jnp.array([[2, 0, 0], [1, 1, 2]]))
    assert selected.layers[0].key is cache.layers[0].key
    assert selected.encoder_kv[0] is encoder_kv and selected.length == 4
    assert selected.beam_ancestors[0].tolist() == [
        [w] * 4 + [own] * 7 for own, w in enumerate([2, 0, 0])
    ]


def test_more_tokens_than_the_cache_has_room_for_are_refused(random_params):
    model = DecoderOnly(BASE)
    tokens = np.ones((B, 1, 12), np.int32)
    variables = {"params": random_params(model, tokens[:, 0])}
    cache = model.init_cache(B, max_length=L)
    step = partial(model.apply, variables, method="decode_step")
    with pytest.raises(ValueError, match="^12 .*max_length=11"):
        jax.jit(step)(tokens, cache)
    with pytest.raises(ValueError, match="^3 .*max_length=11"):
        step(tokens[..., :3], cache.replace(length=jnp.int32(9)))
    logits, _ = jax.jit(step)(tokens[..., :2], cache.replace(length=jnp.int32(9)))
    assert np.isfinite(logits).all()


def test_a_notebook_may_import_the_caches_classes_again():
    """Their names for `jax.export` are taken then."""
    again = runpy.run_path(cache_module.__file__)
    assert again["LayerCache"] is not LayerCache
