import jax
import numpy as np
import pytest

from jaxformer.masks import Mask


def drawn(*rows: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in row.split()] for row in rows])


def test_a_query_sees_no_later_key():
    assert np.array_equal(Mask(causal=True).dense(3, 3)[0, 0], drawn("1 0 0", "1 1 0", "1 1 1"))


def test_with_an_offset_the_queries_stand_later_among_the_keys():
    dense = Mask(causal=True, offset=2).dense(2, 4)
    assert np.array_equal(dense[0, 0], drawn("1 1 1 0", "1 1 1 1"))


def test_the_offset_may_be_known_only_while_running():
    dense = jax.jit(lambda offset: Mask(causal=True, offset=offset).dense(2, 4))
    assert np.array_equal(dense(1)[0, 0], drawn("1 1 0 0", "1 1 1 0"))
    assert np.array_equal(dense(2)[0, 0], drawn("1 1 1 0", "1 1 1 1"))


def test_padding_is_seen_by_no_query():
    valid = np.array([[True, True, False], [True, False, False]])
    dense = np.broadcast_to(Mask(key_valid=valid).dense(2, 3), (2, 1, 2, 3))
    assert np.array_equal(dense[0, 0], drawn("1 1 0", "1 1 0"))
    assert np.array_equal(dense[1, 0], drawn("1 0 0", "1 0 0"))


def test_segments_do_not_see_each_other():
    segments = np.array([[1, 1, 2]])
    dense = Mask(query_segments=segments, key_segments=segments).dense(3, 3)
    assert np.array_equal(dense[0, 0], drawn("1 1 0", "1 1 0", "0 0 1"))


def test_a_window_holds_the_last_keys_only():
    dense = Mask(causal=True, window=2, offset=1).dense(3, 5)
    assert np.array_equal(dense[0, 0], drawn("1 1 0 0 0", "0 1 1 0 0", "0 0 1 1 0"))


def test_facts_are_joined_by_and():
    segments = np.array([[1, 1, 2], [1, 2, 2]])
    valid = np.array([[True, True, True], [True, False, True]])
    mask = Mask(causal=True, key_valid=valid, query_segments=segments, key_segments=segments)
    dense = mask.dense(3, 3)
    assert np.array_equal(dense[0, 0], drawn("1 0 0", "1 1 0", "0 0 1"))
    assert np.array_equal(dense[1, 0], drawn("1 0 0", "0 0 0", "0 0 1"))


@pytest.mark.parametrize("mask", [Mask(), Mask(offset=3)])
def test_without_facts_there_is_no_matrix(mask):
    assert mask.dense(3, 5) is None


def test_a_window_without_a_direction_is_refused():
    with pytest.raises(ValueError, match="window=3 .* needs causal=True"):
        Mask(window=3).dense(5, 7)


def test_pairs_are_seen_where_no_other_fact_forbids_it(rng):
    pairs = rng.random((2, 3, 5)) < 0.5
    dense = Mask(causal=True, offset=1, pairs=pairs).dense(3, 5)
    assert np.array_equal(dense[:, 0], pairs & (np.arange(3)[:, None] + 1 >= np.arange(5)))


def test_a_part_of_a_mask_is_the_part_of_its_matrix(rng):
    mask = Mask(
        causal=True,
        window=5,
        offset=2,
        key_valid=rng.random((2, 11)) < 0.7,
        query_segments=rng.integers(0, 2, (2, 7)),
        key_segments=rng.integers(0, 2, (2, 11)),
        pairs=rng.random((2, 7, 11)) < 0.8,
    )
    whole = np.asarray(mask.dense(7, 11))
    part = jax.jit(lambda query, key: mask.part(query, 3, key, 4).dense(3, 4))
    for query, key in [(0, 0), (2, 5), (4, 7)]:
        assert np.array_equal(part(query, key), whole[:, :, query : query + 3, key : key + 4])
    assert 0 < whole.mean() < 1
    assert Mask().part(1, 2, 3, 4).dense(2, 4) is None
