from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.cache import fold_beams
from jaxformer.ops import attention
from jaxformer.ops.masks import AttentionMask

CONFIG = dict(num_heads=6, num_kv_heads=2, head_dim=4, value_head_dim=5)
B, T, S = 2, 5, 7
EVERYTHING = AttentionMask()


def attend(module, x, y, mask=EVERYTHING):
    """The attention of `x` to `y`."""
    return module(x, module.keys_values(y), mask)


@partial(jax.jit, static_argnums=0)
def apply(module, params, x, y, mask):
    return module.apply({"params": params}, x, y, mask, method=attend)


class Case(NamedTuple):
    """A module, its parameters, queries from `x` [B, T, D] and keys from `y` [B, S, D]."""

    module: MultiHeadAttention
    params: Any
    x: np.ndarray
    y: np.ndarray

    def __call__(self, mask=EVERYTHING, attention_fn=attention.reference):
        module = MultiHeadAttention(**CONFIG, attention_fn=attention_fn)
        return apply(module, self.params, self.x, self.y, mask)


@pytest.fixture(scope="module")
def case(random_params) -> Case:
    module, rng = MultiHeadAttention(**CONFIG), np.random.default_rng(0)
    x = rng.standard_normal((B, T, 11), np.float32)
    y = rng.standard_normal((B, S, 11), np.float32)
    return Case(module, random_params(module, x, y, method=attend), x, y)


def test_beams_share_the_keys_of_their_sentence(case, rng, assert_equal):
    """Three rows a sentence as further queries = the sentence's keys repeated for each row."""
    x = rng.standard_normal((B * 3, T, 11), np.float32)
    mask = AttentionMask(padding_mask=np.arange(S) < np.array([[7], [3]]))
    repeated = AttentionMask(padding_mask=np.repeat(mask.padding_mask, 3, axis=0))
    fold = partial(fold_beams, attention.reference)
    shared = case._replace(x=x)(mask, fold)
    alone = case._replace(x=x, y=np.repeat(case.y, 3, axis=0))(repeated, fold)
    assert_equal(shared, alone, 1e-6)


@pytest.mark.parametrize(("offset", "keys"), [(1, 6), (2, 7), (-4, 1), (-5, 7)])
def test_keys_after_the_last_query_of_a_causal_mask_are_left_out(case, assert_equal, offset, keys):
    noted = []

    def noting(q, k, v, mask, **options):
        noted.append((k.shape[1], mask))
        return attention.reference(q, k, v, mask, **options)

    mask = AttentionMask(causal=True, offset=offset, padding_mask=np.ones((B, S), bool))
    given = case(mask, partial(fold_beams, noting))
    assert_equal(given, case(AttentionMask(explicit=np.tril(np.ones((B, T, S), bool), offset))))
    ((length, seen),) = noted
    assert length == keys and (seen.padding_mask.shape[1], seen.offset) == (keys, offset)


def test_attention_does_what_the_function_given_does(case, assert_equal):
    def nothing(q, k, v, mask, *, scale, bias=None, dropout=None):
        return np.zeros((*q.shape[:3], v.shape[-1]), np.float32)

    bias = case.params["out"]["bias"]
    assert_equal(case(attention_fn=nothing), np.broadcast_to(bias, case.x.shape))


def test_without_keys_and_values_attention_is_self_attention(case, assert_equal):
    params = jax.eval_shape(case.module.init, jax.random.key(0), case.x)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, case.params)
    alone = jax.jit(case.module.apply)({"params": case.params}, case.x)
    assert_equal(alone, case._replace(y=case.x)())


def test_a_bool_array_as_mask_is_refused_even_where_the_attention_function_ignores_it(case):
    def mean_of_values(q, k, v, mask, **_):
        return jnp.zeros((*q.shape[:3], 1)) + v.mean(axis=(1, 2), keepdims=True)

    with pytest.raises(ConfigError, match="mask .*explicit=array"):
        case(np.ones((B, T, S), bool), mean_of_values)
