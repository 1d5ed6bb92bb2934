"""Where each parameter lives on a mesh; those of the package's models: tests/nn/test_axes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxformer.distributed import RULES, partition_specs
from jaxformer.distributed.sharding_rules import inherited_specs, loss_specs
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import Axes
from jaxformer.training.train_step import init_train_state

P = PartitionSpec
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = {
    "query/kernel": Axes(("embed",), ("heads", "head_dim")),
    "up/kernel": Axes(("embed",), ("mlp",)),
    "embedding/table": Axes(("vocab",), ("embed",)),
    "layers/kernel": Axes(("embed",), ("mlp",), layers=1),
}


def test_fsdp_divides_the_largest_dimension_that_it_can():
    axes = {"kernel": Axes(("embed",), ("heads", "head_dim"))}
    shapes = {"kernel": jnp.ones((9, 6, 4)), "up": {"kernel": jnp.ones((5, 7))}}
    assert partition_specs(shapes, SIZES | {"tensor": 1}, axes=axes) == {
        "kernel": P(None, "fsdp"),
        "up/kernel": P(),
    }


def test_moments_follow_their_parameter_by_path_and_shape():
    params = {"up": {"kernel": jnp.ones((10, 14))}, "norm": {"scale": jnp.ones(10)}}
    placed = partition_specs(params, SIZES, axes=AXES)
    state = init_train_state(params, optax.adam(1.0), jax.random.key(0), ema=True)
    adam = inherited_specs(state, params, placed)
    kernel = {key: spec for key, spec in adam.items() if key.endswith("kernel")}
    assert len(kernel) == 4 and set(kernel.values()) == {P("fsdp", "tensor")}
    assert all(spec == P() for key, spec in adam.items() if key not in kernel)
    small = optax.adafactor(min_dim_size_to_factor=4)
    factored = inherited_specs(init_train_state(params, small, jax.random.key(0)), params, placed)
    rows = [spec for key, spec in factored.items() if "v_row" in key]
    assert len(rows) == 2 and set(rows) == {P()}  # [10] belongs to a [10, 14], but is smaller


def test_rules_change_by_the_name_of_an_axis_and_by_the_path_of_a_parameter():
    shapes = {
        "up": {"kernel": jnp.ones((12, 10))},
        "query": {"kernel": jnp.ones((12, 2, 5))},
        "layers": {"kernel": jnp.ones((3, 12, 10))},
    }
    rules = {**RULES, "mlp": "data", "heads": None}
    paths = {"layers/kernel": P(("fsdp", "tensor"))}
    assert partition_specs(shapes, SIZES, rules, paths=paths, axes=AXES) == {
        "up/kernel": P("fsdp", "data"),
        "query/kernel": P(),
        "layers/kernel": P(None, ("fsdp", "tensor")),
    }


def test_a_dimension_that_does_not_divide_is_refused_except_of_the_vocabulary():
    sizes = SIZES | {"tensor": 4}
    shapes = {"query": {"kernel": jnp.ones((10, 6, 8))}}
    message = r"dimension 1 of query/kernel \[10, 6, 8\] has size 6, which tensor=4 does not divide"
    with pytest.raises(ConfigError, match=message):
        partition_specs(shapes, sizes, axes=AXES)
    table = {"embedding": {"table": jnp.ones((50_257, 8))}}
    assert partition_specs(table, sizes, axes=AXES) == {"embedding/table": P(None, "fsdp")}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("model"), "'model'"),
        (P(None, None, "tensor"), r"\[10, 14\]"),
    ],
)
def test_a_spec_that_cannot_be_followed_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        partition_specs({"up": {"kernel": jnp.ones((10, 14))}}, SIZES, paths={"up": spec})


def test_within_a_loss_arrays_of_an_unknown_model_stay_divided_along_tensor_alone():
    params = {"key": {"kernel": np.ones((6, 2, 10))}, "norm": {"scale": np.ones(6)}}
    specs = {"key/kernel": P(("fsdp", "tensor"), None, "sequence"), "norm/scale": P()}
    kept = loss_specs(params, specs)
    assert tuple(kept["key/kernel"]) == ("tensor", None, None)
    assert tuple(kept["norm/scale"]) == ()
