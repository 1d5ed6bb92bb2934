"""The story of a token: what it may know, and that decoding step by step knows the same."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config import with_fields
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.ops import attention
from tests.configs import small
from tests.nn.test_positions import HalfSpeed

B, W, S, T, L = 2, 3, 5, 8, 11
V = 17

# Half the time to compile; each program runs once.
QUICK = {"xla_backend_optimization_level": 0}

BASE = small(
    d_model=24,
    num_heads=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    positions=jf.Relative(buckets=6, max_distance=7),
)

CHOICES = {
    "family": [EncoderDecoder, DecoderOnly],
    "positions": [
        jf.Learned(),
        jf.Rotary(fraction=0.4),
        jf.Alibi(),
        jf.Relative(buckets=6, max_distance=7),
        HalfSpeed(),
    ],
    "feed_forward.activation": ["relu", "silu"],
    "attention.num_kv_heads": [None, 2, 1],
    "embeddings.tied": ["none", "output", "inputs", "all"],
    "output.bias": [False, True],
    "norm.kind": ["layer", "rms"],
    "norm.placement": ["pre", "post", "output", "sandwich", "parallel"],
    "feed_forward.gated": [False, True],
    "use_bias": [True, False],
    "sizes": [{}, {"head_dim": 10, "value_head_dim": 7}],
    "embeddings.scale": [True, False],
    "embeddings.norm": [False, True],
    "window": [
        {},
        {"window.size": 3},
        {"window.size": 3, "window.full_every": 2, "num_decoder_layers": 2},
    ],
    "scan_layers": [False, True],
    "query_key_norm": [
        {},
        {"attention.query_key_norm": True},
        {"attention.query_key_norm": True, "attention.norm_over_heads": True},
    ],
    "attention.softcap": [None, 1.5],
    "attention.qkv_bias": [None, True, False],
}


def pairs_of(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    """The pairs of choices (factor, choice, factor, choice) that a row of choices tries."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def covering_rows(counts: list[int]) -> list[tuple[int, ...]]:
    """Rows of choices such that every pair of choices meets in one of them (greedily few)."""
    rng = np.random.default_rng(1)
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(counts)), 2)
        for a, b in itertools.product(range(counts[i]), range(counts[j]))
    }
    rows = []
    while missing:
        seed = min(missing, key=lambda pair: (-counts[pair[0]] * counts[pair[2]], pair))
        candidates = rng.integers(0, counts, (200, len(counts)))
        candidates[:, [seed[0], seed[2]]] = seed[1], seed[3]
        best = max(map(tuple, candidates), key=lambda row: len(missing & pairs_of(row)))
        rows.append(best)
        missing -= pairs_of(best)
    return rows


ROWS = covering_rows([len(options) for options in CHOICES.values()])


def named(row: tuple[int, ...]) -> dict[str, Any]:
    return {name: CHOICES[name][choice] for name, choice in zip(CHOICES, row, strict=True)}


def model_of(row: tuple[int, ...]) -> Any:
    fields = named(row)
    family, sizes = fields.pop("family"), fields.pop("sizes") | fields.pop("window")
    sizes |= fields.pop("query_key_norm")
    if fields["embeddings.tied"] in ("none", "output"):
        sizes = sizes | {"source_vocab_size": 19}
    return family(with_fields(BASE, {"embeddings.tied": "none"} | sizes | fields))


def test_every_pair_of_choices_is_tried_together():
    tried = set().union(*map(pairs_of, ROWS))
    assert all(tried & pairs_of(row) == pairs_of(row) for row in ROWS)
    for (i, a), (j, b) in itertools.combinations(enumerate(CHOICES.values()), 2):
        for pair in itertools.product(range(len(a)), range(len(b))):
            assert (i, pair[0], j, pair[1]) in tried
    assert len(ROWS) <= 27


def joined(start: Any, steps: Any, parents: np.ndarray) -> np.ndarray:
    """What each final beam has at all positions, of a start [B, 1, 3, ...] and steps [B, W, ...].

    After step i beam w continues what beam `parents[i, b, w]` was.
    """
    story = np.repeat(start, W, axis=1)
    for step, chosen in zip(steps, parents, strict=True):
        story = np.concatenate([story, step[:, :, None]], axis=2)[np.arange(B)[:, None], chosen]
    return story


def assert_decoding_is_the_full_forward(model, rng, random_params, check):
    """One start read at once, shared by W beams, continued one by one and always re-ordered."""
    source, valid = rng.integers(0, V, (B, S)), np.arange(S) < np.array([[5], [3]])
    start, steps = rng.integers(0, V, (B, 1, 3)), rng.integers(0, V, (T - 3, B, W))
    parents = rng.integers(0, W, (T - 3, B, W))
    whole = joined(start, steps, parents).reshape(B * W, T)
    encoded = isinstance(model, EncoderDecoder)
    sources = [np.repeat(x, W, axis=0) for x in (source, valid)] if encoded else []

    @partial(jax.jit, compiler_options=QUICK)
    def run(params):
        apply = partial(model.apply, {"params": params})
        cache = apply(*((source, valid) if encoded else (B,)), max_length=L, method="init_cache")
        first, cache = apply(start, cache, method="decode_step")

        def extend(cache, step):
            logits, cache = apply(step[0][..., None], cache, method="decode_step")
            return cache.reorder_beams(step[1]), logits[:, :, 0]

        cache = cache.reorder_beams(jnp.zeros((B, W), jnp.int32))
        _, others = jax.lax.scan(extend, cache, (steps, parents))
        return first, others, apply(*sources[:1], whole, *sources[1:])

    params = random_params(model, *sources[:1], whole)
    first, others, full = (np.asarray(x, np.float32) for x in run(params))
    assert full.std() > 0.1
    check(joined(first, others, parents), full.reshape(B, W, T, V))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.long] if i % 4 else []) for i, row in enumerate(ROWS)],
    ids=["-".join(map(str, row)) for row in ROWS],
)
def test_decoding_step_by_step_is_the_full_forward(row, rng, random_params, assert_equal):
    assert_decoding_is_the_full_forward(model_of(row), rng, random_params, assert_equal)


def test_decoding_in_bfloat16_is_the_full_forward(rng, random_params, assert_equal):
    def check(given, expected):
        assert_equal(given, expected, 0.1)

    options = jf.AttentionOptions(num_kv_heads=2)
    config = replace(BASE, dtype="bfloat16", attention=options, positions=jf.Rotary())
    assert_decoding_is_the_full_forward(EncoderDecoder(config), rng, random_params, check)


# What a token may know: exactly zero derivatives everywhere else.


def knows(function: Any, *tables: np.ndarray) -> list[np.ndarray]:
    """True where output (b, t) of `function(*tables)` [B, T, F] depends on a row of a table.

    Every token of the batch has an id of its own, so a row of an embedding table is a token.
    """

    @partial(jax.jit, compiler_options=QUICK)
    def slopes(*tables):
        def directed(*tables):
            out = function(*tables)
            return out @ jnp.cos(jnp.arange(out.shape[-1]))

        return jax.jacrev(directed, argnums=range(len(tables)))(*tables)

    return [np.any(np.asarray(slope) != 0, axis=-1) for slope in slopes(*tables)]


# One scheme that adds, one that rotates and one with a bias run in the default suite.
LONG = [pytest.param(x, marks=pytest.mark.long) for x in (jf.Sinusoidal(), jf.Relative(6, 7))]
POSITIONS = jf.Learned(), jf.Rotary(), jf.Alibi(), *LONG


def same_row(length: int) -> np.ndarray:
    return np.eye(B, dtype=bool)[:, None, :, None] & np.ones((1, length, 1, 1), bool)


DEEP = replace(
    BASE,
    vocab_size=B * T,
    source_vocab_size=B * S,
    num_encoder_layers=2,
    num_decoder_layers=2,
    embeddings=jf.EmbeddingOptions(tied="none"),
    feed_forward=jf.FeedForwardOptions("gelu"),
)


def test_a_token_does_not_see_the_future_nor_padding_nor_another_row(rng, random_params):
    model = EncoderDecoder(DEEP)
    source, target = np.arange(B * S).reshape(B, S), np.arange(B * T).reshape(B, T)
    valid = np.arange(S) < np.array([[5], [3]])
    params = random_params(model, source, target)

    def logits(source_table, target_table):
        tables = {
            "source_embedding": {"table": source_table},
            "embedding": {"table": target_table},
        }
        return model.apply({"params": params | tables}, source, target, valid)

    tables = (params[name]["table"] for name in ("source_embedding", "embedding"))
    of_source, of_target = knows(logits, *tables)
    expected = same_row(T) & valid[None, None]
    assert np.array_equal(of_source.reshape(B, T, B, S), np.broadcast_to(expected, (B, T, B, S)))
    past = np.tril(np.ones((T, T), bool))[None, :, None, :]
    assert np.array_equal(of_target.reshape(B, T, B, T), same_row(T) & past)


def test_packed_texts_do_not_see_each_other(random_params):
    config = replace(DEEP, norm=jf.NormOptions(placement="pre"), positions=jf.Rotary())
    model = DecoderOnly(config, attention.blockwise)
    tokens = np.arange(B * T).reshape(B, T)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 3, 3, 3, 3, 3]])
    params = random_params(model, tokens)

    def logits(table):
        return model.apply({"params": params | {"embedding": {"table": table}}}, tokens, segments)

    (given,) = knows(logits, params["embedding"]["table"])
    same = segments[:, :, None] == segments[:, None, :]
    expected = same_row(T) & (same & np.tril(np.ones((T, T), bool)))[:, :, None, :]
    assert np.array_equal(given.reshape(B, T, B, T), expected)


def test_an_encoder_sees_all_but_padding(random_params):
    config = replace(
        DEEP,
        embeddings=replace(DEEP.embeddings, norm=True, num_types=2),
        positions=jf.Learned(),
    )
    model = EncoderOnly(config)
    tokens = np.arange(B * T).reshape(B, T)
    valid = np.arange(T) < np.array([[8], [5]])
    params = random_params(model, tokens)

    def hidden(table):
        variables = {"params": params | {"embedding": {"table": table}}}
        return model.apply(variables, tokens, valid).hidden

    (given,) = knows(hidden, params["embedding"]["table"])
    expected = np.broadcast_to(same_row(T) & valid[None, None], (B, T, B, T))
    assert np.array_equal(given.reshape(B, T, B, T)[valid], expected[valid])


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_packed_texts_get_the_logits_they_get_alone(positions, rng, random_params, assert_equal):
    model = DecoderOnly(replace(BASE, positions=positions, norm=jf.NormOptions(placement="pre")))
    long, short = rng.integers(0, V, (2, B, T))
    packed = np.concatenate([long[:, :5], short[:, :3]], axis=1)
    segments = np.repeat([[1] * 5 + [2] * 3], B, axis=0)
    numbers = np.repeat([[0, 1, 2, 3, 4, 0, 1, 2]], B, axis=0)
    params = random_params(model, packed)

    @jax.jit
    def run(params):
        together = model.apply({"params": params}, packed, segments, numbers)
        return together, model.apply({"params": params}, np.concatenate([long, short]))

    together, alone = map(np.asarray, run(params))
    assert_equal(together, np.concatenate([alone[:B, :5], alone[B:, :3]], axis=1))


# The cache.


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_texts_of_different_lengths_are_continued_together(
    positions, rng, random_params, assert_equal
):
    """Padding after a text is overwritten by what follows it; each text gets its own logits."""
    window = jf.WindowOptions(5)
    model = DecoderOnly(
        replace(BASE, positions=positions, window=window, norm=jf.NormOptions(placement="pre"))
    )
    tokens, lengths = rng.integers(0, V, (B, W, T)), np.array([5, 2])
    params = random_params(model, tokens[:, 0])

    @partial(jax.jit, compiler_options=QUICK)
    def run(params):
        apply = partial(model.apply, {"params": params}, method="decode_step")
        cache = model.init_cache(B, max_length=L).reorder_beams(jnp.zeros((B, W), jnp.int32))
        first, cache = apply(tokens[:, :, :5], cache)
        cache, parts = cache.truncate(jnp.asarray(lengths)), []
        for i in range(T - 5):
            token = np.stack([row[:, n + i] for row, n in zip(tokens, lengths, strict=True)])
            logits, cache = apply(token[..., None], cache)
            parts.append(logits)
        alone = model.apply({"params": params}, tokens.reshape(B * W, T))
        return first, jnp.concatenate(parts, axis=2), alone.reshape(B, W, T, V)

    first, later, alone = run(params)
    for b, length in enumerate(lengths):
        assert_equal(first[b, :, :length], alone[b, :, :length])
        assert_equal(later[b], alone[b, :, length : length + T - 5])


def test_a_cache_beyond_the_learned_positions_is_refused():
    with pytest.raises(ValueError, match="max_length=12 .* max_len=11"):
        DecoderOnly(replace(BASE, positions=jf.Learned())).empty_cache(B, W, 12)


def test_a_cache_is_as_small_as_its_key_value_heads():
    config = replace(
        BASE,
        attention=jf.AttentionOptions(num_kv_heads=2),
        head_dim=10,
        value_head_dim=7,
        dtype="bfloat16",
    )
    (layer,) = DecoderOnly(config).empty_cache(B, W, L).layers
    assert layer.key.shape == (B, 2, 10, W * L) and layer.value.shape == (B, 2, W * L, 7)
    assert {layer.key.dtype, layer.value.dtype} == {jnp.dtype("bfloat16")}


class _Numbered(jf.Block):
    def after_attention(self, *inputs):
        return super().after_attention(*inputs) * (1 + self.layer)


def _unequal(**options):
    """A `Block` with another activation in each layer."""
    activation = ("relu", "silu", "gelu")[options["layer"]]
    return jf.Block(**options | {"feed_forward_options": jf.FeedForwardOptions(activation)})


@pytest.mark.parametrize("block", [jf.Block, _Numbered, _unequal])
def test_a_compiled_step_traces_equal_blocks_once_and_others_each(block, random_params):
    traced = []

    def attention_fn(*args, **options):
        traced.append(args)
        return attention.reference(*args, **options)

    config = replace(BASE, num_decoder_layers=3, num_encoder_layers=0, positions=jf.Rotary())
    model, tokens = DecoderOnly(config, attention_fn, block), jnp.array([[[3]], [[5]]])
    params = random_params(model, tokens[:, 0])
    variables, cache = {"params": params}, DecoderOnly(config).empty_cache(2, 1, max_length=4)
    expected = model.apply(variables, tokens[:, 0])
    traced.clear()
    step = jax.jit(partial(model.apply, method="decode_step"))
    logits, _ = step(variables, tokens, cache)
    assert len(traced) == (1 if block is jf.Block else 3)
    np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-5, atol=1e-5)
    # Values of each block are still recorded under its own name.
    _, values = jax.jit(partial(jf.read_taps, model, method="decode_step"))(params, tokens, cache)
    assert {f"decoder/blocks_{i}/after_attention" for i in range(3)} <= values.keys()
