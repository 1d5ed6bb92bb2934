"""Where each parameter lives on a mesh, by the table of rules."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxformer.config import EmbeddingOptions, Learned, OutputOptions, Relative, TransformerConfig
from jaxformer.distributed import RULES, Rule, partition_specs
from jaxformer.distributed.sharding_rules import inherited_specs
from jaxformer.errors import ConfigError
from jaxformer.nn import heads
from jaxformer.nn.models import EncoderDecoder
from jaxformer.training.train_step import init_train_state
from tests.distributed.test_strategies import BASE, TRANSLATOR, WRITER
from tests.training.test_parameters import own_params, package_models

__all__ = ["own_params", "package_models"]  # fixtures

P = PartitionSpec
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def specs(model: Any, *inputs: Any, rules: Any = RULES, sizes: Any = SIZES) -> dict[str, Any]:
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)["params"])
    return partition_specs(shapes, rules, sizes)


def test_rules_place_the_parameters_of_an_encoder_decoder():
    biased = EncoderDecoder(replace(TRANSLATOR.config, use_bias=True))
    placed = specs(biased, jnp.ones((2, 3), int), jnp.ones((2, 3), int))
    block = {k.removeprefix("decoder/blocks_0/"): v for k, v in placed.items() if "decoder" in k}
    assert placed["embedding/table"] == P("tensor", "fsdp")  # [22, 10]
    for attention in ("attention", "cross_attention"):
        for name in ("query", "key", "value"):
            assert block[f"{attention}/{name}/kernel"] == P("fsdp", "tensor")  # [10, 2, 6]
            assert block[f"{attention}/{name}/bias"] == P("tensor")  # [2, 6]
        assert block[f"{attention}/out/kernel"] == P("tensor", None, "fsdp")  # [2, 6, 10]
        assert block[f"{attention}/out/bias"] == P()
    assert block["feed_forward/up/kernel"] == P("fsdp", "tensor")  # [10, 14]
    assert block["feed_forward/up/bias"] == P("tensor")
    assert block["feed_forward/down/kernel"] == P("tensor", "fsdp")  # [14, 10]
    assert block["feed_forward/down/bias"] == block["attention_norm/scale"] == P()


def test_rules_place_the_parameters_of_a_gated_decoder_with_one_key_head():
    placed = specs(WRITER, jnp.ones((2, 3), int))
    block = {k.removeprefix("decoder/blocks_0/"): v for k, v in placed.items()}
    assert block["attention/query/kernel"] == P("fsdp", "tensor")
    assert block["attention/key/kernel"] == P("fsdp")  # [10, 1, 6]: one head serves both
    assert block["feed_forward/gate/kernel"] == P("fsdp", "tensor")
    assert placed["output/kernel"] == P("fsdp", "tensor")  # [10, 22]


def test_rules_divide_the_relative_table_by_heads_and_the_output_bias_by_tokens():
    config = replace(TRANSLATOR.config, output=OutputOptions(bias=True), positions=Relative())
    placed = specs(EncoderDecoder(config), jnp.ones((2, 3), int), jnp.ones((2, 3), int))
    assert placed["output/bias"] == P("tensor")  # [22]
    for stack in ("encoder", "decoder"):
        assert placed[f"{stack}/positions/relative_bias"] == P(None, "tensor")  # [32, 2]


def test_rules_place_the_parameters_of_a_masked_language_model():
    config = TransformerConfig(
        **BASE,
        num_encoder_layers=1,
        embeddings=EmbeddingOptions(num_types=2),
        positions=Learned(),
        pooler="tanh",
        max_len=8,
    )
    model = heads.MaskedLanguageModel(config)
    placed = specs(model, jnp.ones((2, 3), int))
    inside = {key.partition("encoder/")[2]: spec for key, spec in placed.items()}
    assert inside["embedding/table"] == P("tensor", "fsdp")
    assert inside["type_embedding/table"] == P(None, "fsdp")  # [2, 10]
    assert inside["encoder/positions/table"] == P(None, "fsdp")  # [8, 10]
    assert inside["pooler/kernel"] == P("fsdp")  # [10, 10]
    assert inside["encoder/blocks_0/attention/query/kernel"] == P("fsdp", "tensor")


def test_fsdp_divides_the_largest_dimension_that_it_can():
    shapes = {"kernel": jnp.ones((9, 6, 4)), "up": {"kernel": jnp.ones((5, 7))}}
    assert partition_specs(shapes, RULES, SIZES | {"tensor": 1}) == {
        "kernel": P(None, "fsdp"),
        "up/kernel": P(),
    }


def test_moments_follow_their_parameter_by_path_and_shape():
    params = {"up": {"kernel": jnp.ones((10, 14))}, "norm": {"scale": jnp.ones(10)}}
    placed = partition_specs(params, RULES, SIZES)
    state = init_train_state(params, optax.adam(1.0), jax.random.key(0), ema=True)
    adam = inherited_specs(state, params, placed)
    kernel = {key: spec for key, spec in adam.items() if key.endswith("kernel")}
    assert len(kernel) == 4 and set(kernel.values()) == {P("fsdp", "tensor")}
    assert all(spec == P() for key, spec in adam.items() if key not in kernel)
    small = optax.adafactor(min_dim_size_to_factor=4)
    factored = inherited_specs(init_train_state(params, small, jax.random.key(0)), params, placed)
    rows = [spec for key, spec in factored.items() if "v_row" in key]
    assert len(rows) == 2 and set(rows) == {P()}  # [10] belongs to a [10, 14], but is smaller


def test_rules_of_ones_own_come_first():
    rules = (Rule("down/kernel", P(("fsdp", "tensor"))), *RULES)
    shapes = {name: {"kernel": jnp.ones((12, 10))} for name in ("up", "down")}
    assert partition_specs(shapes, rules, SIZES) == {
        "up/kernel": P("fsdp", "tensor"),
        "down/kernel": P(("fsdp", "tensor")),
    }


def test_a_dimension_that_does_not_divide_is_refused_by_name_or_replicated_by_rule():
    sizes = SIZES | {"tensor": 4}
    shapes = {"query": {"kernel": jnp.ones((10, 6, 8))}}
    message = r"dimension 1 of query/kernel \[10, 6, 8\] has size 6, which tensor=4 does not divide"
    with pytest.raises(ConfigError, match=message):
        partition_specs(shapes, RULES, sizes)
    replicated = (Rule("query", P(None, "tensor"), uneven="replicate"),)
    assert partition_specs(shapes, replicated, sizes) == {"query/kernel": P()}
    table = {"embedding": {"table": jnp.ones((50_257, 8))}}
    assert partition_specs(table, RULES, sizes) == {"embedding/table": P(None, "fsdp")}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("up", P("model")), "names the mesh axis 'model': give one of data, fsdp, tensor"),
        (
            Rule("up", P(None, None, "tensor")),
            "shape .10, 14., but the spec of the rule .* has 3",
        ),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        partition_specs({"up": {"kernel": jnp.ones((10, 14))}}, [rule], SIZES)


@pytest.mark.long
def test_in_the_packages_models_the_last_rule_finds_what_it_found_by_name(package_models):
    by_name = (*RULES[:-1], Rule(r"(^|/)(kernel|table)$", P(), fsdp=True))
    for params in package_models:
        for sizes in (SIZES, {"data": 1, "fsdp": 2, "tensor": 1}):
            lenient = [[rule._replace(uneven="replicate") for rule in t] for t in (RULES, by_name)]
            given, expected = (partition_specs(params, rules, sizes) for rules in lenient)
            assert given == expected


def test_matrices_of_a_users_block_are_divided_and_its_gain_is_not(own_params):
    placed = partition_specs(own_params, RULES, SIZES)
    for number in range(2):
        assert placed[f"blocks_{number}/w_in"] == P(None, "fsdp")  # [6, 14]
        assert placed[f"blocks_{number}/w_out"] == P("fsdp")  # [14, 6]
        assert placed[f"blocks_{number}/gain"] == P()
