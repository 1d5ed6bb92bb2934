"""Which parameters are matrices: by shape, and for the package's models as by name."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxformer.config import (
    BERT_BASE,
    GPT2,
    TRANSFORMER_BASE,
    TRANSFORMER_BIG,
    Alibi,
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NoPositions,
    NormOptions,
    OutputOptions,
    Relative,
    Rotary,
    TransformerConfig,
)
from jaxformer.nn.heads import Classifier, MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer, muon_labels
from jaxformer.training.parameters import flatten, map_with_path, matrix_mask, unflatten

SMALL = TransformerConfig(
    vocab_size=22,
    d_model=10,
    d_ff=14,
    num_heads=2,
    head_dim=6,
    num_encoder_layers=1,
    num_decoder_layers=2,
)
OPTIONS = [
    *({"positions": x} for x in (Learned(), Rotary(), Alibi(), Relative(), NoPositions())),
    *({"embeddings": EmbeddingOptions(tied=name)} for name in ("none", "output", "inputs")),
    {
        "embeddings": EmbeddingOptions(tied="none"),
        "output": OutputOptions(bias=True),
        "source_vocab_size": 26,
    },
    {"attention": AttentionOptions(num_kv_heads=1), "value_head_dim": 3, "use_bias": False},
    {"attention": AttentionOptions(num_kv_heads=1), "positions": Learned(), "head_dim": 1},
    {"num_heads": 1, "d_model": 1, "head_dim": 2, "d_ff": 1, "vocab_size": 1},
    {
        "norm": NormOptions("rms", placement="pre"),
        "feed_forward": FeedForwardOptions("silu", gated=True),
    },
    {
        "embeddings": EmbeddingOptions(num_types=2, norm=True),
        "positions": Learned(),
        "pooler": "tanh",
    },
]
CONFIGS = [replace(SMALL, **options) for options in OPTIONS]
PRESETS = [TRANSFORMER_BASE, TRANSFORMER_BIG, GPT2, BERT_BASE]


def models_of(config: TransformerConfig) -> list[nn.Module]:
    """Every model of the package that `config` has the layers for, with one of each."""
    config = replace(
        config,
        num_encoder_layers=min(config.num_encoder_layers, 1),
        num_decoder_layers=min(config.num_decoder_layers, 2),
    )
    models: list[nn.Module] = []
    if config.num_encoder_layers:
        encoder = EncoderOnly(config)
        models += [encoder, MaskedLanguageModel(config), Classifier(encoder, 1)]
    if config.num_decoder_layers:
        models += [DecoderOnly(config), Classifier(DecoderOnly(config), 3)]
    if config.num_encoder_layers and config.num_decoder_layers:
        models.append(EncoderDecoder(config))
    return models


def shapes_of(model: nn.Module) -> Any:
    tokens = jnp.zeros((2, 3), jnp.int32)
    more = {EncoderDecoder: (tokens,), Classifier: (tokens == 0,)}.get(type(model), ())
    return jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, *more)["params"])


@pytest.fixture(scope="session")
def package_models() -> list[Any]:
    """The shapes of the parameters of the package's models under many options."""
    models = [model for config in (SMALL, *PRESETS) for model in models_of(config)]
    for config in CONFIGS:  # these two have all layers of the others
        models += [MaskedLanguageModel(config), EncoderDecoder(config)]
    return [shapes_of(model) for model in models]


def is_named_as_a_matrix(path: str) -> bool:
    """The rule by names that shapes have replaced."""
    return path.rpartition("/")[2] in ("kernel", "table", "relative_bias")


def is_named_for_muon(path: str) -> bool:
    """The rule by names that shapes have replaced."""
    in_block = any(name.startswith("blocks_") for name in path.split("/"))
    return in_block and path.rpartition("/")[2] == "kernel"


@pytest.mark.long
def test_in_the_packages_models_shapes_decide_as_names_did(package_models):
    kinds = set()
    for params in package_models:
        labels = flatten(muon_labels(params))
        for path, is_matrix in flatten(matrix_mask(params)).items():
            assert is_matrix == is_named_as_a_matrix(path), path
            assert (labels[path] == "muon") == is_named_for_muon(path), path
            kinds.add((path.rpartition("/")[2], is_matrix))
    matrices = {("kernel", True), ("table", True), ("relative_bias", True)}
    assert kinds == matrices | {("bias", False), ("scale", False)}


class OwnBlock(nn.Module):
    """A block of a user, with names of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w_in = self.param("w_in", nn.initializers.normal(), (6, 14))
        w_out = self.param("w_out", nn.initializers.normal(), (14, 6))
        gain = self.param("gain", nn.initializers.ones, (6,))
        return x + nn.relu((x * gain[None]) @ w_in) @ w_out


class OwnModel(nn.Module):
    """Two blocks between layers of Flax."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(2):
            x = OwnBlock(name=f"blocks_{number}")(x)
        return nn.Dense(3, name="output")(x)


@pytest.fixture(scope="session")
def own_params() -> Any:
    return OwnModel().init(jax.random.key(0), jnp.ones((2, 6)))["params"]


@pytest.mark.parametrize("name", ["adam", "muon", "lion", "adafactor"])
def test_matrices_of_a_users_block_decay_and_its_gain_does_not(own_params, name):
    config = OptimizerConfig("constant", name, learning_rate=0.5, warmup_steps=0, weight_decay=0.2)
    optimizer = make_optimizer(config)
    nothing = jax.tree.map(jnp.zeros_like, own_params)
    updates, _ = jax.jit(optimizer.update)(nothing, optimizer.init(own_params), own_params)
    params = flatten(own_params)
    for path, update in flatten(updates).items():
        decay = 0.0 if path.endswith(("gain", "bias")) else 0.1
        np.testing.assert_allclose(update, -decay * params[path], atol=1e-6, err_msg=path)


def test_muon_turns_the_matrices_of_a_users_block(own_params):
    rng = np.random.default_rng(5)
    gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), own_params)
    config = OptimizerConfig("constant", "muon", learning_rate=1.0, warmup_steps=0)
    optimizer = make_optimizer(config)
    found, _ = jax.jit(optimizer.update)(gradients, optimizer.init(own_params), own_params)
    updates = flatten(found)
    for path in ("blocks_0/w_in", "blocks_1/w_out"):
        values = np.linalg.svd(updates[path] / (0.2 * 14**0.5), compute_uv=False)
        assert 0.6 < values.min() and values.max() < 1.3
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    expected = flatten(adam.update(gradients, adam.init(own_params))[0])
    for path in ("blocks_0/gain", "output/kernel", "output/bias"):
        np.testing.assert_allclose(updates[path], -expected[path], rtol=1e-5)


def test_a_bias_has_the_trailing_dimensions_of_a_larger_leaf_beside_it():
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    tree = {
        "projection": {"matrix": leaf(7, 2, 3), "shift": leaf(2, 3), "other": leaf(3, 2)},
        "table": leaf(2, 3),
        "scale": leaf(3),
        "temperature": leaf(),
    }
    assert matrix_mask(tree) == {
        "projection": {"matrix": True, "shift": False, "other": True},
        "table": True,
        "scale": False,
        "temperature": False,
    }


def test_a_tree_is_flattened_by_path_and_put_together_again():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert unflatten(flatten(tree)) == tree
    assert flatten((5, [7, None, 11])) == {"0": 5, "1/0": 7, "1/2": 11}
    doubled = map_with_path(lambda path, leaf: f"{path}={leaf}", tree)
    assert doubled == {"a": {"b": "a/b=1", "c": {"d": "a/c/d=2"}}, "e": "e=3"}
