"""Search and sampling against enumeration, on toys with and without memory."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxformer.config import TransformerConfig
from jaxformer.decoding import (
    SamplerInputs,
    SamplingConfig,
    SearchConfig,
    TranslationOptions,
    beam_more,
    beam_search,
    begin_beams,
    put_rows,
    sample,
)
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.text import tokenizers

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@struct.dataclass
class NoMemory:
    """The cache of a Markov model."""

    def reorder_beams(self, parents):
        return self


@struct.dataclass
class Prefix:
    """A cache of every token so far, so that a wrong `reorder_beams` changes what follows."""

    tokens: jax.Array
    index: jax.Array

    def reorder_beams(self, parents):
        return self.replace(tokens=jnp.take_along_axis(self.tokens, parents[..., None], axis=1))


def prefix_cache(batch, width, length):
    return Prefix(jnp.zeros((batch, width, length), jnp.int32), jnp.zeros((), jnp.int32))


def markov_step(table, tokens, cache):
    """The logits are the last token's row of `table` [V, V]."""
    return table[tokens], cache


def history_step(tables, tokens, cache):
    """The logits are sum_i tables[i, token i] over all tokens so far; `tables` [L, V, V]."""
    index = jnp.broadcast_to(cache.index, len(tokens))
    seen = cache.tokens.at[jnp.arange(len(tokens)), :, index].set(tokens, mode="drop")
    places = jnp.arange(len(tables))[None, None]
    written = places <= index[:, None, None]
    rows = jnp.where(written[..., None], tables[places, seen], 0.0)
    return rows.sum(axis=2), Prefix(seen, cache.index + 1)


def history_tables(seed, length, vocab):
    return np.random.default_rng(seed).normal(size=(length, vocab, vocab)).astype(np.float32)


def logarithm(probabilities):
    with np.errstate(divide="ignore"):
        return np.float32(np.log(probabilities))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum())


def next_log_probs(tables, prefix):
    return log_softmax(sum(tables[i, token].astype(np.float64) for i, token in enumerate(prefix)))


def every_text(tables, first, limit, end):
    """All (tokens, log_probs) of at most `limit` tokens that end with `end`."""
    others = [token for token in range(tables.shape[-1]) if token != end]
    for size in range(limit):
        for body in itertools.product(others, repeat=size):
            tokens = (*body, end)
            yield tokens, log_probs_of(tables, first, tokens)


def log_probs_of(tables, first, tokens):
    whole = (first, *tokens)
    return [next_log_probs(tables, whole[: i + 1])[token] for i, token in enumerate(tokens)]


def search_history(tables, first, limits, **settings):
    return jax.device_get(_search_history(tables, first, limits, SearchConfig(**settings)))


@partial(jax.jit, static_argnames="config")
def _search_history(tables, first, limits, config):
    cache = prefix_cache(len(first), config.beam_size, config.max_new_tokens)
    return beam_search(partial(history_step, tables), cache, first, limits, config)


@partial(jax.jit, static_argnames="config")
def sample_history(tables, prompts, rng, config):
    cache = prefix_cache(len(prompts.last_tokens), 1, config.max_new_tokens)
    step = partial(history_step, tables)
    return sample(step, cache, prompts, rng, config, eos=(3,))


@partial(jax.jit, static_argnames="config")
def sample_markov(table, prompts, rng, config):
    step = partial(markov_step, table)
    return sample(step, NoMemory(), prompts, rng, config)


@partial(jax.jit, static_argnames="config")
def search_markov(table, first, limits, config):
    return beam_search(partial(markov_step, table), NoMemory(), first, limits, config)


def penalised(kind, exponent, total, count):
    return total / (((5 + count) / 6) if kind == "gnmt" else count) ** exponent


@pytest.mark.parametrize(
    ("kind", "exponent"), [("gnmt", 0.6), ("gnmt", -0.7), ("power", 1.3), ("power", 0.0)]
)
def test_a_beam_with_room_for_all_prefixes_ranks_all_texts(kind, exponent):
    vocab, end, length, width = 3, 1, 6, 31
    tables = history_tables(5, length, vocab)
    first, limits = np.array([0, 2, 1, 2]), np.array([5, 4, 1, 2])
    penalty = dict(length_penalty_kind=kind, length_penalty=exponent)
    config = dict(penalty, beam_size=width, max_new_tokens=length, eos=(end,))
    found = search_history(tables, first, limits, **config)
    for b in range(len(first)):
        texts = [
            (penalised(kind, exponent, sum(log_probs), len(tokens)), tokens, log_probs)
            for tokens, log_probs in every_text(tables, first[b], limits[b], end)
        ]
        texts.sort(key=lambda text: -text[0])
        assert len(texts) == 2 ** limits[b] - 1
        for w in range(width):
            score, tokens, log_probs = texts[w] if w < len(texts) else (-np.inf, (), ())
            padding = [0] * (length - len(tokens))
            assert found.tokens[b, w].tolist() == [*tokens, *padding]
            close(found.scores[b, w], score)
            close(found.log_probs[b, w], [*log_probs, *padding])


def textbook(tables, first, limit, width, end, exponent):
    """Beam search with lists: of all extensions the `width` best stay, the ended ones leave."""
    live, finished = [(0.0, ())], []
    for count in range(1, limit + 1):
        extended = []
        for total, tokens in live:
            log_probs = next_log_probs(tables, (first, *tokens))
            for token, log_prob in enumerate(log_probs):
                if count < limit or token == end:
                    extended.append((total + log_prob, (*tokens, token)))
        best = sorted(extended, reverse=True)[:width]
        ended = [(t, tokens) for t, tokens in best if tokens[-1] == end]
        finished += [(penalised("gnmt", exponent, t, count), tokens) for t, tokens in ended]
        live = [(t, tokens) for t, tokens in best if tokens[-1] != end]
    return sorted(finished, reverse=True)[:width]


@pytest.mark.parametrize(("width", "exponent"), [(2, 0.6), (5, -0.7)])
def test_a_narrow_beam_finds_what_the_textbook_finds(width, exponent):
    vocab, end, length = 7, 3, 11
    tables = history_tables(13, length, vocab)
    first, limits = np.array([0, 1, 2, 4, 5, 6]), np.array([11, 5, 7, 10, 1, 3])
    config = dict(length_penalty=exponent, beam_size=width, max_new_tokens=length, eos=(end,))
    found = search_history(tables, first, limits, **config)
    for b in range(len(first)):
        expected = textbook(tables, first[b], limits[b], width, end, exponent)
        padded = [[*tokens, *[0] * (length - len(tokens))] for _, tokens in expected]
        missing = width - len(expected)
        assert found.tokens[b].tolist() == padded + [[0] * length] * missing
        close(found.scores[b], [score for score, _ in expected] + [-np.inf] * missing)


@pytest.mark.parametrize(
    "kind, exponent, early_stopping, extra",
    [
        ("gnmt", 0.6, "never", 0),
        ("power", -0.7, "beam_full", 1),
        ("power", 0.6, "heuristic", 2),
    ],
)
def test_a_beam_of_one_is_greedy_where_the_text_ends(kind, exponent, early_stopping, extra):
    vocab, end, length, batch = 5, 3, 13, 23
    tables = history_tables(3, length, vocab)
    tables[..., end] += 0.2
    first, limits = np.arange(batch) % vocab, 2 + np.arange(batch) % 12
    prompts = SamplerInputs(first, limits, np.arange(batch))
    config = SamplingConfig(max_new_tokens=length, temperature=0.0)
    taken = jax.device_get(sample_history(tables, prompts, jax.random.key(0), config))
    ended = np.any(taken.tokens[:, 0] == end, axis=-1)
    sizes = np.argmax(taken.tokens[:, 0] == end, axis=-1) + 1
    assert 5 < ended.sum() < batch and len(set(sizes[ended])) > 2
    settings = dict(early_stopping=early_stopping, extra_candidates=extra)
    settings |= dict(length_penalty_kind=kind, beam_size=1, max_new_tokens=length, eos=(end,))
    found = search_history(tables, first, limits, length_penalty=exponent, **settings)
    assert np.array_equal(found.tokens[ended], taken.tokens[ended])
    close(found.log_probs[ended], taken.log_probs[ended])
    scores = penalised(kind, exponent, taken.scores[:, 0], sizes)
    close(found.scores[ended, 0], scores[ended])


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "beam_full"])
def test_a_text_depends_neither_on_its_neighbours_nor_on_the_room_for_it(early_stopping):
    """The first sentence stops early."""
    vocab, end, length, width = 5, 3, 17, 3
    tables = history_tables(29, length + 2, vocab)
    tables[0, 1, end] += 5.0
    first, limits = np.array([1, 0, 4, 2]), np.array([17, 17, 3, 11])
    config = dict(beam_size=width, max_new_tokens=length, eos=(end,), early_stopping=early_stopping)
    together = search_history(tables[:length], first, limits, **config)
    for b in range(len(first)):
        config["max_new_tokens"] = length + 2
        alone = search_history(tables, first[[b] * 4], limits[[b] * 4], **config)
        assert np.array_equal(together.tokens[b], alone.tokens[0][:, :length])
        close(together.scores[b], alone.scores[0])


@pytest.mark.parametrize("early_stopping", ["never", "beam_full"])
def test_a_search_stops_when_its_config_says_so(early_stopping):
    table = jnp.log(jnp.array([[0.05, 0.05, 0.9]] * 3))

    def step(tokens, cache):
        # After six tokens there are only NaNs: a search that went on would be spoilt.
        cache = cache.replace(index=cache.index + 1)
        return jnp.where(cache.index > 6, jnp.nan, table[tokens]), cache

    @jax.jit
    def search(first, limits):
        config = SearchConfig(beam_size=2, early_stopping=early_stopping, max_new_tokens=41)
        return beam_search(step, prefix_cache(2, 2, 41), first, limits, config)

    found = jax.device_get(search(np.array([0, 1]), np.array([41, 37])))
    assert found.tokens[:, :, :3].tolist() == [[[2, 0, 0], [0, 2, 0]]] * 2
    assert np.all(np.isfinite(found.scores))


MEAN = SearchConfig(beam_size=2, length_penalty=1.0, length_penalty_kind="power", max_new_tokens=9)


def test_a_full_beam_is_content_where_a_longer_search_finds_a_better_mean():
    #        0.7      0.4      1.0
    # start -----> a -----> b -----> end    0.28, mean -0.42
    #    \         +- 0.6 -------> end      0.42, mean -0.43
    #     +- 0.3 ----------------> end      0.30, mean -1.20
    end, start, a, b, slow = range(5)
    table = np.zeros((5, 5))
    table[start, [end, a]] = 0.3, 0.7
    table[a, [end, b]] = 0.6, 0.4
    table[b, end] = table[end, end] = 1.0
    # Keeps the search going when the others have stopped.
    table[slow, [slow, start]] = 0.5
    first, limits = np.array([start, start, slow]), np.array([7, 3, 7])

    def search(config):
        return jax.device_get(search_markov(logarithm(table), first, limits, config))

    full = search(replace(MEAN, early_stopping="beam_full", eos=(end,)))
    assert full.tokens[:2, :, :3].tolist() == [[[a, end, 0], [end, 0, 0]]] * 2
    assert full.tokens[2, :, :4].tolist() == [[start, a, end, 0], [slow, start, a, end]]
    best = search(replace(MEAN, eos=(end,)))
    assert best.tokens[:2, :, :3].tolist() == [[[a, b, end], [a, end, 0]]] * 2
    close(best.scores[:2], [[np.log(0.28) / 3, np.log(0.42) / 2]] * 2)


def test_a_search_waits_for_a_text_that_is_better_only_far_ahead_or_only_next():
    end, start, a, *chain = range(7)
    first, limits = np.array([start, start]), np.array([9, 5])

    def search(table, config):
        return jax.device_get(search_markov(logarithm(table), first, limits, config))

    mean = replace(MEAN, eos=(end,))
    # Ending at once has the mean log 0.5 = -0.69. Behind `a` a chain of certain tokens brings
    # log 0.03 to -1.17 at three tokens, but to -0.58 at six, which the second limit forbids.
    table = np.zeros((7, 7))
    table[start, [end, a]] = 0.5
    table[a, [end, chain[0]]] = 0.94, 0.06
    for token, following in zip(chain, [*chain[1:], end], strict=True):
        table[token, following] = 1.0
    table[end, end] = 1.0
    found = search(table, mean)
    far = [a, *chain, end]
    assert found.tokens[0, :, : len(far)].tolist() == [[a, end, 0, 0, 0, 0], far]
    assert found.tokens[1, :, :2].tolist() == [[a, end], [end, 0]]
    # Here each further token makes a text worse: only the next one can still win.
    table = np.zeros((7, 7))
    table[start, [end, a]], table[a, [end, chain[0]]] = (0.3, 0.7), (0.4, 0.6)
    table[chain[0], end] = table[end, end] = 1.0
    found = search(table, replace(mean, length_penalty=-0.5))
    assert found.tokens[..., :3].tolist() == [[[end, 0, 0], [a, chain[0], end]]] * 2


def test_a_limit_below_one_leaves_no_text():
    tables = history_tables(41, 5, 5)
    config = dict(beam_size=2, max_new_tokens=5, eos=(3,))
    found = search_history(tables, np.array([0, 1]), np.array([0, 5]), **config)
    assert np.isneginf(found.scores[0]).all() and not found.tokens[0].any()
    assert np.isfinite(found.scores[1]).all()


def test_two_models_under_vmap_find_what_each_finds_alone():
    first, limits = np.array([0, 1, 4]), np.array([7, 2, 5])
    both = np.stack([history_tables(5, 7, 11), history_tables(13, 7, 11)])
    config = SearchConfig(beam_size=3, max_new_tokens=7, eos=(3,))
    together = jax.vmap(lambda tables: _search_history(tables, first, limits, config))(both)
    for i, tables in enumerate(both):
        alone = _search_history(tables, first, limits, config)
        assert np.array_equal(together.tokens[i], alone.tokens)
        close(together.scores[i], alone.scores)
    assert not np.array_equal(together.tokens[0], together.tokens[1])


PROBABILITIES = np.array(
    [
        [0.10, 0.20, 0.30, 0.25, 0.15],
        [0.40, 0.10, 0.10, 0.20, 0.20],
        [0.05, 0.35, 0.15, 0.25, 0.20],
        [0.20, 0.20, 0.20, 0.10, 0.30],
        [0.02, 0.08, 0.50, 0.10, 0.30],
    ]
)


HOT = partial(SamplingConfig, temperature=1.7)


def draw_pairs():
    """4,000 texts of two tokens of the Markov model with `PROBABILITIES`, begun at token 4."""
    table, rows = jnp.log(jnp.asarray(PROBABILITIES)), np.arange(4_000)
    first, limits = np.full((4_000,), 4), np.full((4_000,), 2)
    prompts = SamplerInputs(first, limits, rows)
    return jax.device_get(sample_markov(table, prompts, jax.random.key(7), HOT(max_new_tokens=2)))


def chi_square(counts, shares):
    expected = counts.sum() * shares
    return ((counts - expected) ** 2 / expected).sum()


def softened(probabilities, value):
    powers = probabilities ** (1 / value)
    return powers / powers.sum(axis=-1, keepdims=True)


def test_pairs_of_tokens_are_drawn_with_the_models_probabilities():
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(draw_pairs().tokens[:, 0].T), 1)
    rows = softened(PROBABILITIES, 1.7)
    # Of 24 degrees of freedom: more than 59 is seen once in 10,000 seeds.
    assert chi_square(counts, rows[4][:, None] * rows) < 59


def test_an_ended_or_empty_text_is_followed_by_zeros():
    tables = history_tables(47, 11, 7)
    first, limits = np.arange(31) % 7, np.arange(31) % 12
    prompts, config = SamplerInputs(first, limits, np.arange(31)), HOT(max_new_tokens=11)
    found = jax.device_get(sample_history(tables, prompts, jax.random.key(1), config))
    tokens = found.tokens[:, 0]
    written = np.minimum(
        limits, np.where((tokens == 3).any(axis=1), (tokens == 3).argmax(axis=1) + 1, 11)
    )
    after = np.arange(11) >= written[:, None]
    assert after[0].all() and not tokens[after].any() and not found.log_probs[:, 0][after].any()
    assert (found.log_probs[:, 0][~after] < 0).all()
    close(found.scores[0, 0], 0.0)


FIRST, LIMITS = jnp.array([0, 1]), jnp.array([3, 3])


@pytest.mark.parametrize(
    "bos, limits, changes, message",
    [
        (FIRST[:, None], LIMITS, {}, r"bos has shape \(2, 1\)"),
        (FIRST, jnp.array(3), {}, r"max_new_tokens has shape \(\)"),
        (FIRST, LIMITS, {"config": SearchConfig(eos=(2, 5))}, r"eos=\(2, 5\)"),
    ],
)
@pytest.mark.usefixtures("misuse")
def test_a_search_refuses_sizes_that_do_not_fit(bos, limits, changes, message):
    step = partial(markov_step, jnp.zeros((5, 5)))
    with pytest.raises(ValueError, match=message):
        beam_search(step, NoMemory(), bos, limits, **changes)


def test_a_batch_without_sentences_is_refused():
    step, none = partial(markov_step, jnp.zeros((5, 5))), jnp.zeros(0, int)
    with pytest.raises(ValueError, match="empty"):
        beam_search(step, NoMemory(), none, none)
    with pytest.raises(ValueError, match="empty"):
        sample(step, NoMemory(), SamplerInputs(none, none, none), jax.random.key(0))


def test_the_result_has_room_for_the_longest_text_unless_a_length_is_given():
    step = partial(markov_step, jnp.zeros((5, 5)))
    limits = np.array([3, 7])
    for config, room in (((), 7), ((SearchConfig(max_new_tokens=11),), 11)):
        search = partial(beam_search, step, NoMemory(), FIRST, limits, *config)
        assert jax.eval_shape(search).tokens.shape == (2, 4, room)
    found = beam_search(step, NoMemory(), FIRST, limits, SearchConfig(max_new_tokens=5))
    assert found.tokens.shape == (2, 4, 5)
    with pytest.raises(ValueError, match="max_new_tokens"):
        jax.jit(lambda limits: beam_search(step, NoMemory(), FIRST, limits))(limits)


@pytest.mark.usefixtures("misuse")
def test_search_and_sampling_refuse_logits_and_prompts_of_another_shape():
    def step(tokens, cache):
        return jnp.zeros((*tokens.shape, 1, 5)), cache

    with pytest.raises(ValueError, match=r"\(2, 4, 1, 5\)"):
        beam_search(step, NoMemory(), FIRST, LIMITS)
    rng, prompts = jax.random.key(0), SamplerInputs(FIRST, LIMITS, jnp.arange(2))
    with pytest.raises(ValueError, match=r"\(2, 1, 1, 5\)"):
        sample(step, NoMemory(), prompts, rng)
    with pytest.raises(ValueError, match="example_ids"):
        sample(step, NoMemory(), prompts._replace(example_ids=jnp.arange(3)), rng)
    with pytest.raises(ValueError, match="last_tokens"):
        sample(step, NoMemory(), prompts._replace(last_tokens=FIRST[:, None]), rng)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"beam_size": 0}, "beam_size=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens=3"),
        ({"length_penalty": 30.0}, "length_penalty=30.0"),
        ({"min_new_tokens": 3, "max_new_tokens": 3}, "at most 3 tokens .* EOS .*min_new_tokens=3"),
        ({"suppress_tokens": (2,), "max_new_tokens": 3}, "but suppress_tokens forbids it: allow"),
        ({"forced_bos": 5, "max_new_tokens": 1}, "at most 1 tokens .* begins with forced_bos=5"),
        ({"beam_size": 2.5}, "beam_size=2.5"),
        ({"eos": [2]}, r"eos=\[2\]"),
        ({"eos": 2}, "eos=2"),
        ({"eos": (2, -1)}, r"eos=\(2, -1\)"),
        ({"suppress_tokens": (1.0,)}, "suppress_tokens="),
        ({"extra_candidates": -1}, "extra_candidates=-1"),
        ({"eos": ()}, "eos is empty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"early_stopping": "soon"}, "early_stopping='soon'"),
        ({"at_max_length": "end"}, "at_max_length='end'"),
    ],
)
def test_a_config_refuses_what_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        SearchConfig(**settings)


def test_a_search_in_pieces_into_which_sentences_enter_is_the_search_at_once():
    """With a length penalty of its own, a sentence enters the row of one that has stopped."""
    step = partial(history_step, jnp.asarray(history_tables(5, 7, 11)))
    first, limits, penalties = np.arange(5), np.array([2, 7, 5, 6, 3]), np.array([0, 1, 2, 0.5, 1])
    config = SearchConfig(beam_size=3, max_new_tokens=7, eos=(3,), length_penalty_kind="power")
    more = jax.jit(lambda state, n, ended: beam_more(step, state, n, ended))

    def begin(rows):
        cache = prefix_cache(len(rows), 3, 7).replace(index=jnp.zeros(len(rows), int))
        values = {"length_penalty": jnp.float32(penalties[rows])}
        values |= {
            "min_new_tokens": limits[rows] * 0,
            "repetition_penalty": penalties[rows] * 0 + 1,
        }
        return begin_beams(cache, first[rows], limits[rows], config, values=values)

    state = begin(np.array([0, 1, 2]))
    found = {}
    state, rows = more(state, 2, 3), {0: 0, 1: 1, 2: 2}
    assert state.stopped.tolist()[0] and not state.stopped.all()
    found[0] = jax.tree.map(lambda x: x[0], state.finished)
    state, rows[0] = put_rows(state, np.array([0]), begin(np.array([3]))), 3
    state = more(state, 9, 3)
    assert state.stopped.all()
    found |= {
        text: jax.tree.map(lambda x, row=row: x[row], state.finished) for row, text in rows.items()
    }
    for text, best in found.items():
        settings = replace(config, length_penalty=float(penalties[text]))
        cache = prefix_cache(1, 3, 7).replace(index=jnp.zeros(1, int))
        alone = beam_search(step, cache, first[[text]], limits[[text]], settings)
        assert np.array_equal(best.tokens, alone.tokens[0])
        close(best.scores, alone.scores[0])


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "beam_full"])
def test_a_search_of_logits_that_are_nan_ends_at_its_limits_with_scores_that_are_nan(
    early_stopping,
):
    config = SearchConfig(beam_size=2, max_new_tokens=7, early_stopping=early_stopping)
    steps = []

    def step(tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return jnp.full((*tokens.shape, 5), jnp.nan), cache

    found = beam_search(step, NoMemory(), FIRST, jnp.array([3, 5]), config)
    jax.effects_barrier()
    assert np.isnan(found.scores).all() and len(steps) == 5


def test_sampling_from_logits_that_are_nan_ends_at_its_limits_with_scores_that_are_nan():
    def step(tokens, cache):
        return jnp.full((*tokens.shape, 5), jnp.nan), cache

    prompts = SamplerInputs(FIRST, jnp.array([3, 5]), jnp.arange(2))
    drawn = sample(step, NoMemory(), prompts, jax.random.key(0), SamplingConfig(top_k=3))
    assert np.isnan(drawn.scores).all()


def test_a_cache_shorter_than_the_texts_is_refused():
    model = DecoderOnly(TransformerConfig(7, d_model=8, d_ff=9, num_heads=2, num_decoder_layers=1))
    step, cache = partial(markov_step, jnp.zeros((7, 7))), model.init_cache(2, max_length=5)
    prompts = SamplerInputs(FIRST, LIMITS + 3, jnp.arange(2))
    with pytest.raises(ValueError, match="^6 "):
        sample(step, cache, prompts, jax.random.key(0))
    with pytest.raises(ValueError, match="^6 "):
        beam_search(step, cache, FIRST, LIMITS + 3)


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_a_cache_of_another_number_of_beams_is_refused(beams):
    model = DecoderOnly(TransformerConfig(7, d_model=8, d_ff=9, num_heads=2, num_decoder_layers=1))
    step, cache = (
        partial(markov_step, jnp.zeros((7, 7))),
        model.init_cache(2, max_length=9, num_beams=beams),
    )
    with pytest.raises(ValueError, match=f"num_beams={beams}.*beam_size=3"):
        beam_search(step, cache, FIRST, LIMITS, SearchConfig(beam_size=3))


def test_the_default_special_ids_are_those_of_the_tokenizers_trained_here():
    options = TranslationOptions()
    assert (options.pad, options.bos) == (tokenizers.PAD, tokenizers.BOS)
    assert SearchConfig().eos == (tokenizers.EOS,)
