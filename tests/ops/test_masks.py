import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.ops.masks import AttentionMask, check_mask

QUERY_SEGMENTS = np.array([[1, 1, 1, 2, 2], [1, 2, 3, 3, 4], [1, 1, 1, 1, 1]])
KEY_SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 3, 3, 3, 5], [2, 2, 2, 2, 2, 2, 2]])
ATTRIBUTES = {
    "causal": {"causal": True},
    "offset": {"causal": True, "offset": 2},
    "window": {"causal": True, "offset": 2, "window": 3},
    "padding": {"padding_mask": np.arange(7) < np.array([[7], [3], [0]])},
    "segments": {"query_segments": QUERY_SEGMENTS, "key_segments": KEY_SEGMENTS},
    "explicit": {"explicit": np.random.default_rng(1).random((3, 5, 7)) < 0.5},
}
EVERYTHING = {name: x for each in ATTRIBUTES.values() for name, x in each.items()}


def may_attend(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    distance, segments = mask.offset + query - key, (mask.query_segments, mask.key_segments)
    return bool(
        (not mask.causal or distance >= 0)
        and (mask.window is None or distance < mask.window)
        and (mask.padding_mask is None or mask.padding_mask[row, key])
        and (segments[0] is None or segments[0][row, query] == segments[1][row, key])
        and (mask.explicit is None or mask.explicit[row, query, key])
    )


@pytest.mark.parametrize("attributes", [*ATTRIBUTES.values(), EVERYTHING], ids=[*ATTRIBUTES, "all"])
def test_a_key_is_seen_where_all_attributes_allow_it(attributes):
    mask = AttentionMask(**attributes)
    found = np.broadcast_to(mask.materialize(5, 7), (3, 1, 5, 7))[:, 0]
    expected = [may_attend(mask, *place) for place in np.ndindex(3, 5, 7)]
    assert np.array_equal(found.ravel(), expected) and 0 < found.mean() < 1


@pytest.mark.parametrize("attributes", [*ATTRIBUTES.values(), EVERYTHING], ids=[*ATTRIBUTES, "all"])
def test_keys_that_are_put_first_are_seen_by_all_queries_and_change_no_other(attributes):
    mask = AttentionMask(**attributes)
    dense = np.broadcast_to(mask.materialize(5, 7), (3, 1, 5, 7))
    more = mask.with_first_keys(2, queries=5, keys=7)
    found = np.broadcast_to(more.materialize(5, 9), (3, 1, 5, 9))
    assert found[..., :2].all() and np.array_equal(found[..., 2:], dense)
    check_mask(more, (3, 5, 9))


def test_a_mask_that_allows_all_stays_one_when_keys_are_put_first():
    assert AttentionMask().with_first_keys(2, queries=5, keys=7) == AttentionMask()


def drawn(*rows: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in row.split()] for row in rows])


def test_the_offset_may_be_known_only_while_running():
    matrix = jax.jit(lambda offset: AttentionMask(causal=True, offset=offset).materialize(2, 4))
    assert np.array_equal(matrix(1)[0, 0], drawn("1 1 0 0", "1 1 1 0"))
    assert np.array_equal(matrix(2)[0, 0], drawn("1 1 1 0", "1 1 1 1"))


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(offset=3)])
def test_without_attributes_there_is_no_matrix(mask):
    assert mask.materialize(3, 5) is None


def test_a_slice_of_a_mask_is_the_slice_of_its_matrix(rng):
    mask = AttentionMask(
        causal=True,
        window=5,
        offset=2,
        padding_mask=rng.random((2, 11)) < 0.7,
        query_segments=rng.integers(0, 2, (2, 7)),
        key_segments=rng.integers(0, 2, (2, 11)),
        explicit=rng.random((2, 7, 11)) < 0.8,
    )
    whole = np.asarray(mask.materialize(7, 11))
    part = jax.jit(lambda query, key: mask.slice(query, 3, key, 4).materialize(3, 4))
    for query, key in [(0, 0), (2, 5), (4, 7)]:
        assert np.array_equal(part(query, key), whole[:, :, query : query + 3, key : key + 4])
    assert 0 < whole.mean() < 1
    assert AttentionMask().slice(1, 2, 3, 4).materialize(2, 4) is None


def test_a_slice_keeps_an_explicit_row_that_is_for_all_queries(rng):
    mask = AttentionMask(explicit=rng.random((2, 1, 11)) < 0.6)
    part = mask.slice(2, 3, 5, 4).materialize(3, 4)
    assert np.array_equal(part, mask.materialize(7, 11)[..., 5:9])


def test_a_bool_array_in_place_of_a_mask_is_refused():
    with pytest.raises(ConfigError, match="mask is a ndarray.*explicit="):
        check_mask(np.ones((2, 3, 5), bool), (2, 3, 5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_segments": np.ones((2, 3))}, "query_segments"),
        ({"key_segments": np.ones((2, 5))}, "key_segments"),
        ({"causal": True, "window": 0}, "window=0 and causal=True"),
        ({"causal": True, "window": 2.0}, "window=2.0 and causal=True"),
        ({"causal": True, "window": True}, "window=True and causal=True"),
        ({"window": 3}, "window=3 and causal=False"),
        ({"padding_mask": np.ones((2, 5), int)}, "padding_mask is of int64, .*give .*`mask != 0`"),
        ({"explicit": np.zeros((2, 3, 5))}, "explicit is of float64, .*`mask > -1e4`.*PyTorch"),
        ({"padding_mask": [[True]]}, "padding_mask"),
        ({"padding_mask": np.ones((2, 5, 1), bool)}, r"shape \(2, 5, 1\)"),
        ({"padding_mask": np.ones(5, bool)}, r"shape \(5,\)"),
        ({"explicit": np.ones((3, 5), bool)}, r"shape \(3, 5\)"),
        ({"explicit": np.ones((2, 4, 3, 5), bool)}, r"shape \(2, 4, 3, 5\)"),
    ],
)
def test_a_mask_without_a_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AttentionMask(**settings)


def test_an_offset_that_is_a_number_stays_known_in_a_rematerialised_block():
    found = []

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            found.append(mask.offset)
            return x

    x = np.ones((2, 3))
    for offset in (0, 5):
        mask = AttentionMask(causal=True, offset=offset, padding_mask=np.ones((2, 7), bool))
        jax.eval_shape(lambda x, mask: nn.remat(Block)().apply({}, x, mask), x, mask)
    assert found == [0, 5]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"padding_mask": np.ones((2, 3), bool)}, r"padding_mask has the shape \(2, 3\)"),
        ({"padding_mask": np.ones((3, 5), bool)}, r"must be \[2, 5\] for 2 examples of 3 queries"),
        ({"explicit": np.ones((2, 5, 3), bool)}, r"explicit has .*must be \[2, 3, 5\]"),
        (
            {"query_segments": np.ones((2, 5)), "key_segments": np.ones((2, 5))},
            r"query_segments has the shape \(2, 5\)",
        ),
    ],
)
def test_a_mask_of_other_sizes_is_refused(mask, message):
    with pytest.raises(ConfigError, match=message):
        check_mask(AttentionMask(**mask), (2, 3, 5))
