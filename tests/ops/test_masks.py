import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.ops.masks import AttentionMask


def drawn(*rows: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in row.split()] for row in rows])


def test_a_query_sees_no_later_key():
    assert np.array_equal(
        AttentionMask(causal=True).materialize(3, 3)[0, 0], drawn("1 0 0", "1 1 0", "1 1 1")
    )


def test_with_an_offset_the_queries_stand_later_among_the_keys():
    matrix = AttentionMask(causal=True, offset=2).materialize(2, 4)
    assert np.array_equal(matrix[0, 0], drawn("1 1 1 0", "1 1 1 1"))


def test_the_offset_may_be_known_only_while_running():
    matrix = jax.jit(lambda offset: AttentionMask(causal=True, offset=offset).materialize(2, 4))
    assert np.array_equal(matrix(1)[0, 0], drawn("1 1 0 0", "1 1 1 0"))
    assert np.array_equal(matrix(2)[0, 0], drawn("1 1 1 0", "1 1 1 1"))


def test_padding_is_seen_by_no_query():
    valid = np.array([[True, True, False], [True, False, False]])
    matrix = np.broadcast_to(AttentionMask(padding_mask=valid).materialize(2, 3), (2, 1, 2, 3))
    assert np.array_equal(matrix[0, 0], drawn("1 1 0", "1 1 0"))
    assert np.array_equal(matrix[1, 0], drawn("1 0 0", "1 0 0"))


def test_segments_do_not_see_each_other():
    segments = np.array([[1, 1, 2]])
    matrix = AttentionMask(query_segments=segments, key_segments=segments).materialize(3, 3)
    assert np.array_equal(matrix[0, 0], drawn("1 1 0", "1 1 0", "0 0 1"))


def test_a_window_holds_the_last_keys_only():
    matrix = AttentionMask(causal=True, window=2, offset=1).materialize(3, 5)
    assert np.array_equal(matrix[0, 0], drawn("1 1 0 0 0", "0 1 1 0 0", "0 0 1 1 0"))


def test_attributes_are_combined_by_and():
    segments = np.array([[1, 1, 2], [1, 2, 2]])
    valid = np.array([[True, True, True], [True, False, True]])
    mask = AttentionMask(
        causal=True, padding_mask=valid, query_segments=segments, key_segments=segments
    )
    matrix = mask.materialize(3, 3)
    assert np.array_equal(matrix[0, 0], drawn("1 0 0", "1 1 0", "0 0 1"))
    assert np.array_equal(matrix[1, 0], drawn("1 0 0", "0 0 0", "0 0 1"))


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(offset=3)])
def test_without_attributes_there_is_no_matrix(mask):
    assert mask.materialize(3, 5) is None


def test_a_window_without_causal_is_refused():
    with pytest.raises(ValueError, match="window=3 counts keys backwards .* set causal=True"):
        AttentionMask(window=3)


def test_an_explicit_mask_combines_with_the_other_attributes(rng):
    explicit = rng.random((2, 3, 5)) < 0.5
    matrix = AttentionMask(causal=True, offset=1, explicit=explicit).materialize(3, 5)
    assert np.array_equal(matrix[:, 0], explicit & (np.arange(3)[:, None] + 1 >= np.arange(5)))


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


def test_two_masks_combine_to_one_that_allows_what_both_allow(rng):
    segments = {
        "query_segments": rng.integers(0, 2, (2, 7)),
        "key_segments": rng.integers(0, 2, (2, 11)),
    }
    a = AttentionMask(
        causal=True,
        window=7,
        offset=2,
        padding_mask=rng.random((2, 11)) < 0.8,
        explicit=rng.random((2, 7, 11)) < 0.8,
    )
    b = AttentionMask(
        causal=True,
        window=5,
        offset=2,
        padding_mask=rng.random((2, 11)) < 0.8,
        explicit=rng.random((2, 7, 11)) < 0.8,
        **segments,
    )
    for other in (b, AttentionMask(offset=3), AttentionMask(**segments), AttentionMask()):
        matrix, expected = (a & other).materialize(7, 11), a.materialize(7, 11)
        if other != AttentionMask(offset=3) and other.materialize(7, 11) is not None:
            expected = expected & other.materialize(7, 11)
        assert np.array_equal(matrix, expected)
        assert np.array_equal((other & a).materialize(7, 11), expected)
    assert (a & b).window == 5 and (a & b).offset == 2


def test_a_mask_combines_with_itself_while_its_offset_is_traced():
    def combined(offset):
        mask = AttentionMask(causal=True, offset=offset)
        return (mask & mask).materialize(2, 4)

    assert np.array_equal(jax.jit(combined)(1)[0, 0], drawn("1 1 0 0", "1 1 1 0"))


def test_masks_that_cannot_be_combined_are_refused(rng):
    def segments():
        return AttentionMask(query_segments=np.ones((2, 3)), key_segments=np.ones((2, 5)))

    with pytest.raises(ConfigError, match="the offsets 1 and 2 cannot be combined: give both the"):
        AttentionMask(causal=True, offset=1) & AttentionMask(causal=True, offset=2)
    with pytest.raises(ConfigError, match="different query_segments cannot be combined: number"):
        segments() & segments()
    with pytest.raises(ConfigError, match="a bool array was given as mask"):
        AttentionMask() & np.ones((2, 3, 5), bool)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_segments": np.ones((2, 3))}, "query_segments was given without key_segments"),
        ({"key_segments": np.ones((2, 5))}, "key_segments was given without query_segments"),
        ({"causal": True, "window": 0}, "window=0 is not a number of keys: give a Python int"),
        ({"causal": True, "window": -3}, "window=-3 is not a number of keys"),
        ({"causal": True, "window": 2.0}, "window=2.0 is not a number of keys"),
        ({"causal": True, "window": True}, "window=True is not a number of keys"),
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
