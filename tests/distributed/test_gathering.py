"""Which losses may read parameters that are gathered where they are used; traced, not run."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.distributed.gathering import Gathering
from jaxformer.errors import ConfigError


class Layers(nn.Module):
    """Three layers in one scan, [3, 15, 15] and [3, 15], computed again for the gradient."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(module: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(nn.Dense(15, name="dense", parent=module)(x)), None

        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(layer), length=3, **axes)(self, x, None)[0]


SPECS = {"dense": {"kernel": P(None, None, "fsdp"), "bias": P()}}


def model_loss(params, batch, rng):
    return jnp.sum(Layers().apply({"params": params}, batch)), jnp.float32(len(batch)), {}


def with_penalty(penalty):
    """The loss of the model and a `penalty` of the parameters."""

    def loss(params, batch, rng):
        value, *rest = model_loss(params, batch, rng)
        return value + penalty(params), *rest

    return loss


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def shapes(loss, parts=2):
    """The shapes of the gradient on 2 x 5 devices, without having them."""
    params = jax.eval_shape(Layers().init, jax.random.key(0), jnp.zeros((2, 15)))["params"]
    mesh = AbstractMesh((2, 5), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    gathering = Gathering(SPECS, ("data", "fsdp"), "use")
    step = jax.shard_map(
        lambda params, batch: gathering.gradient_sums(loss, params, batch, None, parts)[0],
        mesh=mesh,
        in_specs=(SPECS, P(("data", "fsdp"))),
        out_specs=SPECS,
        check_vma=False,
    )
    gradient = jax.eval_shape(step, params, jax.ShapeDtypeStruct((40, 15), jnp.float32))
    return jax.tree.map(lambda x: x.shape, gradient["dense"])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "penalty",
    [
        lambda params: 0.0,
        lambda params: squares(nn.unbox(params)),
        lambda params: squares(params["dense"]["bias"]),  # every device has the whole
        lambda params: model_loss(jax.tree.map(jnp.sin, params), jnp.ones((2, 15)), None)[0],
    ],
    ids=["module", "unboxed", "undivided", "changed"],
)
def test_a_loss_that_gathers_what_it_reads_is_traced(penalty, parts):
    found = shapes(with_penalty(penalty), parts)
    assert found == {"kernel": (3, 15, 15), "bias": (3, 15)}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "penalty",
    [squares, jax.jit(squares), lambda params: jnp.any(params["dense"]["kernel"].part > 9.0)],
    ids=["leaves", "jit", "no gradient"],
)
def test_a_loss_that_takes_a_part_for_the_whole_is_refused(penalty, parts):
    said = 'gather_at="use", but the loss reads dense/kernel without gathering: read parameters'
    with pytest.raises(ConfigError, match=re.escape(said)):
        shapes(with_penalty(penalty), parts)
