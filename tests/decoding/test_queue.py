"""Texts that enter the rows of ended ones are what they are alone, in any row and at any time."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import DecoderOnly, EncoderDecoder, TransformerConfig
from jaxformer.config import Alibi, AttentionOptions, Learned, Relative, Rotary, Sinusoidal
from jaxformer.decoding import Prompts, SamplingConfig, SearchConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.int8 import quantize
from jaxformer.pipelines import translate_ids
from jaxformer.pipelines.continuation import Round, continue_ids

pytestmark = pytest.mark.long

N, PADDED, ROWS, V = 23, 29, 5, 31


def config(positions, **sizes):
    sizes = {"d_model": 12, "d_ff": 17, "num_heads": 2, "max_len": 19} | sizes
    return TransformerConfig(V, **sizes, num_decoder_layers=2, positions=positions)


def drawn(model, *inputs):
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    return jax.tree.map(lambda leaf: 2 * leaf, params)  # so that the next tokens differ


def rows_of(lists, width, left=False):
    padded = np.zeros((PADDED, width), np.int32)
    for row, ids in enumerate(lists):
        padded[row, width - len(ids) if left else 0 : None if left else len(ids)] = ids
    return padded


def lengths_of(values):
    return np.array([*values, *[0] * (PADDED - len(values))], np.int32)


def assert_same(queued, apart, assert_equal):
    """The same tokens, and the same log-probabilities to the rounding of sums in another order."""
    found = np.isfinite(np.asarray(apart.scores)[:N])
    assert found[:, 0].all()
    for name, tolerance in (("tokens", 0), ("scores", 1e-4), ("log_probs", 1e-4)):
        one, other = (np.asarray(getattr(each, name))[:N][found] for each in (queued, apart))
        assert_equal(one, other, tolerance)


LIMITS = np.random.default_rng(1).permutation([*range(1, 14), *[1] * 5, *[13] * 5])


@pytest.mark.parametrize(("positions", "beam_size"), [(Learned(), 1), (Sinusoidal(), 3)])
def test_a_translation_does_not_depend_on_its_row_and_time(positions, beam_size, assert_equal):
    # The positions end with the cache: a row that waits for a text has none.
    sizes = config(positions, num_encoder_layers=1, max_len=13)
    model, rng = EncoderDecoder(sizes), np.random.default_rng(0)
    params = drawn(model, jnp.ones((1, 3), int), jnp.ones((1, 2), int))
    source = rows_of([rng.integers(3, V, rng.integers(1, 8)) for _ in range(N)], 7)
    search = SearchConfig(beam_size=beam_size, max_new_tokens=13, no_repeat_ngram_size=2)
    inputs = model, params, source, lengths_of(LIMITS), search
    queued, apart = translate_ids(*inputs, rows=ROWS), translate_ids(*inputs)
    assert len(np.unique(np.asarray(apart.tokens)[:N, 0], axis=0)) > N // 3
    assert_same(queued, apart, assert_equal)


@pytest.mark.parametrize(
    ("positions", "penalty", "int8"),
    [(Learned(), 1.0, False), (Rotary(), 1.7, False), (Rotary(), 1.0, True)],
)
def test_a_continuation_does_not_depend_on_its_row_and_time(positions, penalty, int8, assert_equal):
    model, rng = DecoderOnly(config(positions)), np.random.default_rng(2)
    params = drawn(model, jnp.ones((1, 3), int))
    if int8:
        params = quantize(model, params)
    prompts = [rng.integers(3, V, rng.integers(1, 7)) for _ in range(N)]
    sizes, tokens = [len(ids) for ids in prompts], rows_of(prompts, 6, left=True)
    given = Prompts(tokens[:, -1], lengths_of(LIMITS), lengths_of(range(40, 40 + N)))
    if penalty != 1:
        history = {"history": rows_of(prompts, 6), "history_lengths": lengths_of(sizes)}
        given = given._replace(**history)
    padding = lengths_of([6 - size for size in sizes])
    inputs = Round(tokens, padding, given, jax.random.key(3), None)
    settings = {"config": SamplingConfig(max_new_tokens=13, repetition_penalty=penalty)}
    settings |= {"eos": (5, 6), "length": 13, "known": V - 1, "chunk": 2}
    queued = continue_ids(model, params, inputs, **settings, rows=ROWS)
    apart = continue_ids(model, params, inputs, **settings)
    ends = (np.isin(np.asarray(apart.tokens)[:N, 0], (5, 6))).any(axis=1)
    assert 2 < ends.sum() < N - 2, "some end by EOS and some by their length"
    assert_same(queued, apart, assert_equal)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": Relative(5, 13)},
        {"positions": Alibi()},
        {"attention": AttentionOptions(window=3)},
    ],
)
def test_a_ring_for_a_model_that_sees_the_order_of_slots_is_refused(changes):
    model = DecoderOnly(replace(config(Rotary()), **changes))
    given = {"params": drawn(model, jnp.ones((2, 3), int))}
    cache = model.apply(given, 2, max_length=7, method="init_cache")
    tokens = jnp.ones((2, 1, 1), int)
    assert model.apply(given, tokens, cache, method="decode_step")[0].shape == (2, 1, 1, V)
    with pytest.raises(ConfigError, match="need a cache in the order of the tokens"):
        model.apply(given, tokens, cache.as_ring(), method="decode_step")
