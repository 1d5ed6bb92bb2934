"""The shapes in signatures are checked in this run of the tests (see tests/shapes.py)."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxformer.ops.cross_entropy import cross_entropy


@pytest.mark.parametrize(
    "labels", [jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 3, 1), jnp.int32), jnp.zeros((2, 3))]
)
def test_an_array_that_contradicts_a_signature_is_refused(labels):
    with pytest.raises(TypeCheckError, match="cross_entropy"):
        cross_entropy(jnp.zeros((2, 3, 7)), labels, jnp.ones((2, 3), bool))
