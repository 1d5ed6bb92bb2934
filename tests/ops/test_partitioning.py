"""Positions and heads on a mesh that is only traced for, without devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxformer.errors import ConfigError
from jaxformer.ops.partitioning import (
    axes_of_heads,
    divide_heads,
    divide_positions,
    gather_heads,
    gather_positions,
)


def on_mesh(**sizes):
    """A mesh with these axes, which are XLA's to partition."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    return jax.sharding.use_abstract_mesh(mesh)


def constraints(function, *shape):
    """The mesh axes that divide the positions of an array [B, T, D] and of its gradient."""
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(function(x) ** 2)))(jnp.ones(shape))
    return re.findall(r"spec=P\(UNCONSTRAINED, (.*), UNCONSTRAINED\)", str(program))


def test_what_is_divided_forward_is_gathered_backward_and_the_other_way_round():
    with on_mesh(data=5, sequence=2, tensor=3):
        divided, gathered = (
            constraints(function, 2, 6, 5) for function in (divide_positions, gather_positions)
        )
    assert divided == ["('sequence', 'tensor')", "'sequence'"]
    assert gathered == ["'sequence'", "('sequence', 'tensor')"]


def test_the_gradient_of_attention_is_divided_by_position_before_it_is_divided_by_head():
    with on_mesh(sequence=2, tensor=3):
        *_, gradient, of_heads = constraints(gather_heads, 2, 6, 6, 5)
    assert (gradient, of_heads) == ("'sequence', 'tensor'", "None, ('tensor', 'sequence')")


def test_one_position_is_not_divided_and_a_length_with_a_rest_is_said_to_stay_whole():
    with on_mesh(sequence=2, tensor=3):
        assert constraints(divide_positions, 2, 1, 5) == []
        with pytest.warns(UserWarning, match="7 positions .*sequence=2"):
            assert constraints(divide_positions, 2, 7, 5) == []
    with on_mesh(tensor=3):  # as each device computes its own heads and features, nothing is said
        assert constraints(divide_positions, 2, 7, 5) == []


@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"sequence": 2, "tensor": 2}])
def test_heads_of_keys_that_devices_do_not_divide_are_repeated(sizes):
    q, k, v = (np.ones((2, 5, heads, 3)) for heads in (8, 2, 2))
    with on_mesh(**sizes):
        divided = jax.eval_shape(divide_heads, q, k, v)
        step = jax.eval_shape(divide_heads, q[:, :1], k, v)  # a query alone reads what it can
    assert [x.shape[2] for x in divided] == [8, 4, 4]
    assert [x.shape[2] for x in step] == [8, 2, 2]


def test_heads_of_queries_that_devices_do_not_divide_are_refused():
    x = np.ones((2, 8, 6, 3))
    said = "6 heads are not divisible by tensor=2 x sequence=2: give a mesh whose axes"
    with on_mesh(sequence=2, tensor=2), pytest.raises(ConfigError, match=said):
        divide_heads(x, x, x)


@pytest.mark.parametrize(
    ("tensor", "sequence", "heads", "axes"),
    [
        (2, 3, 12, ("tensor", "sequence")),
        (2, 3, 4, "tensor"),
        (2, 3, 9, None),
        (1, 3, 9, "sequence"),
        (1, 1, 9, None),
    ],
)
def test_heads_of_a_cache_are_divided_along_tensor_and_then_along_sequence(
    tensor, sequence, heads, axes
):
    with on_mesh(sequence=sequence, tensor=tensor):
        assert axes_of_heads(heads) == axes
