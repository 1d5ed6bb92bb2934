"""The axes of parameters: of the package's models, and of a user's block with names of its own."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

import jaxformer as jf
from jaxformer.distributed import partition_specs
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import Axes, parameter_axes
from jaxformer.nn.dense import Dense
from jaxformer.nn.heads import Classifier, MaskedLanguageModel
from jaxformer.nn.int8 import quantize
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.ops.dense import QuantizedMatrix
from jaxformer.training.lora import FROZEN, add_adapters, merge_adapters
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
BASE: dict[str, Any] = dict(vocab_size=22, d_model=10, d_ff=14, num_heads=2, head_dim=6)
LLAMA = jf.TransformerConfig(
    **BASE,
    num_decoder_layers=2,
    use_bias=False,
    norm=jf.NormOptions("rms", placement="pre"),
    attention=jf.AttentionOptions(num_kv_heads=1),
    feed_forward=jf.FeedForwardOptions("silu", gated=True),
    embeddings=jf.EmbeddingOptions(tied="none"),
    positions=jf.Rotary(),
)
TRANSLATOR = jf.TransformerConfig(
    **BASE,
    num_encoder_layers=2,
    num_decoder_layers=1,
    source_vocab_size=26,
    embeddings=jf.EmbeddingOptions(tied="none"),
    output=jf.OutputOptions(bias=True),
    positions=jf.Relative(),
)
BERT = jf.TransformerConfig(
    **BASE,
    num_encoder_layers=1,
    max_len=8,
    embeddings=jf.EmbeddingOptions(num_types=2, norm=True),
    positions=jf.Learned(),
    pooler="tanh",
)
SCANNED = jf.TransformerConfig(
    **BASE,
    num_encoder_layers=2,
    num_decoder_layers=2,
    scan_layers=True,
    attention=jf.AttentionOptions(query_key_norm=True),
)
MODELS = {
    "encoder-decoder": EncoderDecoder(TRANSLATOR),
    "bert": MaskedLanguageModel(BERT),
    "classifier": Classifier(EncoderOnly(jf.TransformerConfig(**BASE, num_encoder_layers=1)), 4),
    "llama": DecoderOnly(LLAMA),
    "scanned llama": DecoderOnly(replace(LLAMA, scan_layers=True)),
    "scanned encoder-decoder": EncoderDecoder(SCANNED),
}
# {model: {path: [spec on 2 x 2 x 2 devices, is a matrix, moved by Muon]}},
# written by the rules about names that stood here before.
RECORDED = json.loads(Path(__file__).with_name("recorded_axes.json").read_text())


def shapes_of(model: nn.Module) -> Any:
    ids = jnp.ones((2, 3), jnp.int32)
    more = {EncoderDecoder: (ids,), Classifier: (ids == 0,)}.get(type(model), ())
    return jax.eval_shape(lambda: model.init(jax.random.key(0), ids, *more)["params"])


@pytest.mark.parametrize("name", MODELS)
def test_axes_decide_for_the_packages_models_as_the_recorded_rules_by_name_did(name):
    axes = parameter_axes(MODELS[name])
    specs = partition_specs(shapes_of(MODELS[name]), SIZES, axes=axes)
    decided = {
        path: [list(spec), bool(axes[path].inputs), axes[path].is_hidden]
        for path, spec in specs.items()
    }
    assert decided == RECORDED[name]
    assert {path for path in axes if axes[path].layers} == {x for x in axes if "stacked" in x}


class Mixer(nn.Module):
    """A user's block, with names of its own and matrices of two and of three dimensions."""

    @nn.compact
    def __call__(self, x, mask, **others):
        size = x.shape[-1]
        mix = self.param("mix", nn.initializers.lecun_normal(), (size, size))
        gain = self.param("gain", nn.initializers.ones, (size,))
        h = nn.DenseGeneral((3, 4), name="w_in")(nn.tanh(x @ mix))
        return x * gain[None, None] + nn.DenseGeneral(size, axis=(-2, -1), name="proj")(h)


class DenseMixer(nn.Module):
    """A user's block that is made of our dense layers and of one of Flax."""

    @nn.compact
    def __call__(self, x, mask, **others):
        h = Dense((3, 4), name="w_in")(nn.Dense(x.shape[-1], name="of_flax")(x))
        return Dense(x.shape[-1], num_inputs=2, name="proj")(h)


class NamedMixer(Mixer):
    """The same block, which says that `w_in` makes heads."""

    AXES: ClassVar = {
        "w_in/kernel": "embed -> heads head_dim",
        "w_in/bias": "heads head_dim",
        "proj/kernel": "heads head_dim -> embed",
    }


def mixing(block=Mixer, **changes):
    return DecoderOnly(
        replace(LLAMA, positions=jf.NoPositions(), **changes), block=lambda **_: block()
    )


LISTED, STACKED = "decoder/blocks_1", "decoder/stacked_blocks"


@pytest.fixture(scope="module", params=[LISTED, STACKED])
def users_model(request, random_params):
    """A model of two user's blocks, its parameters, their axes, and the path of a block."""
    model = mixing(scan_layers=request.param == STACKED)
    params = random_params(model, np.ones((2, 3), int))
    return model, params, parameter_axes(model, jnp.ones((2, 3), int)), request.param


def update_of(config, params, axes, gradients):
    optimizer = make_optimizer(config, axes=axes)

    @jax.jit
    def update(gradients, params):
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    return flatten(jax.tree.map(np.asarray, update(gradients, params)))


RATES = OptimizerConfig("constant", learning_rate=1.0, warmup_steps=0)
MATRICES = {"mix", "w_in/kernel", "proj/kernel"}


@pytest.mark.parametrize(
    ("users_model", "name"),
    [(LISTED, "adam"), (STACKED, "muon"), (LISTED, "lion")],
    indirect=["users_model"],
)
def test_matrices_of_a_users_block_decay_and_its_gain_and_biases_do_not(users_model, name):
    _, params, axes, block = users_model
    config = replace(RATES, name=name, weight_decay=0.1)
    updates = update_of(config, params, axes, jax.tree.map(np.zeros_like, params))
    for path, leaf in flatten(params).items():
        if path.startswith(block):
            decay = 0.1 if path.removeprefix(f"{block}/") in MATRICES else 0.0
            np.testing.assert_allclose(updates[path], -decay * leaf, atol=1e-6, err_msg=path)


def test_muon_turns_each_matrix_of_a_users_block_as_inputs_by_outputs(users_model, rng):
    _, params, axes, block = users_model
    gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    updates = update_of(replace(RATES, name="muon"), params, axes, gradients)
    adam = update_of(RATES, params, axes, gradients)
    for name, shape in {"mix": (10, 10), "w_in/kernel": (10, 12), "proj/kernel": (12, 10)}.items():
        for layer in updates[f"{block}/{name}"].reshape(-1, *shape):
            values = np.linalg.svd(layer / (0.2 * max(shape) ** 0.5), compute_uv=False)
            assert 0.6 < values[-2] and values[0] < 1.3, name  # the last of `mix` stays small
    for path in (f"{block}/gain", f"{block}/w_in/bias", "output/kernel", "embedding/table"):
        np.testing.assert_allclose(updates[path], adam[path], rtol=1e-5)


def test_an_adapter_of_a_users_matrix_is_inputs_by_rank_by_outputs(users_model):
    model, params, axes, block = users_model
    layers = (2,) if "stacked" in block else ()
    settings = {"rank": 3, "alpha": 6.0, "targets": "decoder/", "axes": axes}
    adapted = jax.jit(partial(add_adapters, **settings))(params, jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in flatten(adapted).items()}
    assert shapes[f"{block}/proj/kernel_lora/a"] == (*layers, 12, 3)
    assert shapes[f"{block}/proj/kernel_lora/b"] == (*layers, 3, 10)
    assert shapes[f"{block}/mix_lora/a"] == (*layers, 10, 3)
    assert f"{block}/gain_lora/a" not in shapes
    config = replace(RATES, weight_decay=0.1, freeze=FROZEN)
    updates = update_of(config, adapted, axes, jax.tree.map(np.ones_like, adapted))
    assert {path for path, x in updates.items() if np.any(x)} == {
        path for path in shapes if path.endswith(("_lora/a", "_lora/b"))
    }
    ids = np.random.default_rng(1).integers(0, 22, (2, 5))

    @jax.jit
    def logits(params, adapted):
        trained = merge_adapters(jax.tree.map(lambda x: x + 0.1, adapted))
        return [model.apply({"params": each}, ids) for each in (trained, params)]

    assert not np.allclose(*logits(params, adapted))


class OwnExperts(nn.Module):
    """A user's five experts: a parameter of its own, and a vmap over a network of ours."""

    AXES: ClassVar = {
        "weight": "experts embed -> mlp",
        "offset": "experts mlp",
        "networks/up/kernel": "experts embed -> mlp",
        "networks/up/bias": "experts mlp",
        "networks/down/kernel": "experts mlp -> embed",
        "networks/down/bias": "experts embed",
    }

    @nn.compact
    def __call__(self, x, dropout_rng=None):
        size = x.shape[-1]
        weight = self.param("weight", nn.initializers.normal(0.3), (6, size, 14))
        offset = self.param("offset", nn.initializers.zeros, (6, 14))
        hidden = jnp.einsum("btd,edf->btf", x, weight) + offset.sum(0)[None, None]
        networks = nn.vmap(jf.FeedForward, {"params": 0}, {"params": True})
        out = networks(14, name="networks")(jnp.stack([x] * 6))
        return out.sum(0) + hidden.sum(-1, keepdims=True)


EXPERTS = jf.FeedForwardOptions("silu", gated=True, experts=jf.ExpertOptions(6, top_k=2))
OF_EXPERTS = {
    "own": ({}, OwnExperts, ("weight", "networks/up/kernel"), "networks/down/kernel"),
    "library": ({"feed_forward": EXPERTS}, None, ("gate/kernel", "up/kernel"), "down/kernel"),
}


@pytest.fixture(scope="module", params=[(x, y) for x in OF_EXPERTS for y in (False, True)])
def of_experts(request, random_params):
    """The parameters of a model with experts, their axes, the path of one, and names in it."""
    name, scan_layers = request.param
    changes, own, up, down = OF_EXPERTS[name]
    block = jf.Block
    if own is not None:
        block = partial(jf.Block, make_feed_forward=lambda **_: own())
    config = replace(LLAMA, use_bias=True, scan_layers=scan_layers, **changes)
    model = DecoderOnly(config, block=block)
    params = random_params(model, np.ones((2, 3), int))
    path = "decoder/stacked_blocks" if scan_layers else "decoder/blocks_1"
    return params, parameter_axes(model), f"{path}/feed_forward", up, down


def test_an_axis_of_experts_is_declared_once_for_a_parameter_and_for_a_vmap(of_experts):
    params, axes, path, up, down = of_experts
    layers = int("stacked" in path)
    specs = partition_specs(params, {"data": 1, "fsdp": 2, "tensor": 2}, axes=axes)
    before = (None,) * layers
    for name in up:
        found = axes[f"{path}/{name}"]
        assert found.stacks == ("experts",) and found.layers == layers and found.is_hidden
        assert (found.inputs, found.outputs) == (("embed",), ("mlp",))
        assert tuple(specs[f"{path}/{name}"]) == (*before, "tensor", None, "fsdp")
    assert tuple(specs[f"{path}/{down}"]) == (*before, "tensor", "fsdp")
    bias = axes[f"{path}/{up[-1]}".replace("kernel", "bias")]
    assert (bias.stacks, bias.inputs, bias.outputs) == (("experts",), (), ("mlp",))
    # Seven devices do not divide six experts, but their hidden layers of 14.
    rules = {"experts": "tensor", "mlp": "tensor"}
    specs = partition_specs(params, {"data": 1, "fsdp": 5, "tensor": 7}, rules, axes=axes)
    assert tuple(specs[f"{path}/{down}"]) == (*before, None, "tensor", "fsdp")


@pytest.mark.parametrize(("ns_coeffs", "least"), [("standard", 0.68), ("polar_express", 0.7)])
def test_muon_turns_each_expert_as_a_matrix_of_its_own(of_experts, rng, ns_coeffs, least):
    params, axes, path, up, down = of_experts
    gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    config = replace(RATES, name="muon", ns_coeffs=ns_coeffs)
    updates = update_of(config, params, axes, gradients)
    for name in (*up, down):
        update = updates[f"{path}/{name}"]
        for matrix in update.reshape(-1, *update.shape[-2:]):
            values = np.linalg.svd(matrix / (0.2 * 14**0.5), compute_uv=False)
            assert least < values[-1] and values[0] < 1.3, name


def test_matrices_of_experts_decay_and_their_biases_do_not(of_experts):
    params, axes, path, up, down = of_experts
    zeros = jax.tree.map(np.zeros_like, params)
    updates = update_of(replace(RATES, weight_decay=0.1), params, axes, zeros)
    leaves = flatten(params)
    for name in (*up, down):
        expected = -0.1 * leaves[f"{path}/{name}"]
        np.testing.assert_allclose(updates[f"{path}/{name}"], expected, atol=1e-6)
    assert not np.any(updates[f"{path}/{down}".replace("kernel", "bias")])


def test_each_expert_has_an_adapter_of_its_own(of_experts):
    params, axes, path, up, _ = of_experts
    layers = (2,) if "stacked" in path else ()
    settings = {"rank": 3, "alpha": 6.0, "targets": "feed_forward/", "axes": axes}
    adapted = flatten(add_adapters(params, jax.random.key(0), **settings))
    adapter = f"{path}/{up[-1]}_lora"
    shapes = [adapted[f"{adapter}/{name}"].shape for name in ("a", "b", "scale")]
    assert shapes == [(*layers, 6, 10, 3), (*layers, 6, 3, 14), (*layers, 6)]
    a, b = (jnp.float32(np.random.default_rng(1).normal(size=shape)) for shape in shapes[:2])
    trained = unflatten_dict(adapted | {f"{adapter}/a": a, f"{adapter}/b": b}, sep="/")
    merged = flatten(merge_adapters(trained))[f"{path}/{up[-1]}"]
    expected = adapted[f"{path}/{up[-1]}"] + 2.0 * np.matmul(a, b)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_a_name_of_experts_that_counts_too_few_axes_is_refused():
    class Wrong(OwnExperts):
        AXES: ClassVar = {"weight": "experts -> mlp"}

    block = partial(jf.Block, make_feed_forward=lambda **_: Wrong())
    with pytest.raises(ConfigError, match="Wrong.AXES .*weight"):
        parameter_axes(DecoderOnly(LLAMA, block=block))


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, True])
def test_dense_layers_of_a_users_block_are_quantized_whatever_their_names(
    scan_layers, random_params
):
    model = mixing(DenseMixer, scan_layers=scan_layers)
    params = random_params(model, np.ones((2, 5), np.int32))
    block = "decoder/stacked_blocks" if scan_layers else "decoder/blocks_0"
    quantized = jax.jit(quantize, static_argnums=0)(model, params)
    is_quantized = lambda leaf: isinstance(leaf, QuantizedMatrix)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(quantized, is_leaf=is_quantized)
    found = {
        "/".join(part.key for part in path): leaf for path, leaf in leaves if is_quantized(leaf)
    }
    assert {path.removeprefix(f"{block}/") for path in found if path.startswith(block)} == {
        "w_in/kernel",
        "proj/kernel",
    }
    assert found[f"{block}/proj/kernel"].values.shape[-2:] == (10, 12)
    ids = np.random.default_rng(1).integers(0, 22, (2, 5))
    logits, exact = (model.apply({"params": given}, ids) for given in (quantized, params))
    assert 1e-4 < np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.05


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_users_block_is_divided_along_fsdp_and_named_axes_along_tensor(scan_layers):
    P = PartitionSpec
    block = "decoder/stacked_blocks" if scan_layers else "decoder/blocks_0"
    first = (None,) if scan_layers else ()
    specs = {}
    for kind in (Mixer, NamedMixer):
        model = mixing(kind, scan_layers=scan_layers)
        sizes = SIZES | {"tensor": 3}
        placed = partition_specs(shapes_of(model), sizes, axes=parameter_axes(model))
        specs[kind] = {name: placed[f"{block}/{name}"] for name in (*MATRICES, "w_in/bias", "gain")}
    assert specs[Mixer] == {
        "mix": P(*first, "fsdp"),  # [10, 10]
        "w_in/kernel": P(*first, "fsdp"),  # [10, 3, 4]
        "proj/kernel": P(*first, None, None, "fsdp"),  # [3, 4, 10]
        "w_in/bias": P(),
        "gain": P(),
    }
    assert specs[NamedMixer] == specs[Mixer] | {
        "w_in/kernel": P(*first, "fsdp", "tensor"),
        "proj/kernel": P(*first, "tensor", None, "fsdp"),
        "w_in/bias": P(*first, "tensor"),
    }


class Outer(nn.Module):
    """Names parameters of Flax's modules, and nests a module of another name for one of them."""

    AXES: ClassVar = {"inner/up/kernel": "embed -> mlp", "pair": "embed vocab ->"}

    @nn.compact
    def __call__(self, x):
        ids = jnp.zeros(x.shape[:1], int)
        pair = self.param("pair", nn.initializers.normal(), (5, 3))
        x = Inner(name="inner")(x) + nn.Embed(7, 5, name="words")(ids)
        return nn.Conv(5, (3,), name="filter")(x) * jnp.sum(pair)


class Inner(nn.Module):
    AXES: ClassVar = {"up/kernel": "embed -> vocab", "up/bias": "vocab"}

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name="up")(x)


def test_the_outermost_name_decides_and_flaxs_modules_need_none():
    axes = parameter_axes(Outer(), jnp.ones((2, 5)))
    assert {path: parameter[:2] for path, parameter in axes.items()} == {
        "inner/up/kernel": (("embed",), ("mlp",)),
        "inner/up/bias": ((), ("vocab",)),
        "pair": (("embed", "vocab"), ()),
        "words/embedding": (("vocab",), ("embed",)),
        "filter/kernel": (("input", "input"), ("output",)),  # [3, 5, 5]
        "filter/bias": ((), ("output",)),
    }
    assert axes["inner/up/kernel"].is_hidden and not axes["filter/kernel"].is_hidden


class Wrong(nn.Module):
    AXES: ClassVar = {"w": "embed -> heads head_dim"}

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (5, 3))


def test_names_of_another_number_of_axes_are_refused():
    with pytest.raises(ConfigError, match="Wrong.AXES .* w, which has 2 ax"):
        parameter_axes(Wrong(), jnp.ones((2, 5)))


def test_three_dimensions_without_axes_are_refused_and_two_are_a_matrix():
    three = {"query": {"kernel": jnp.ones((5, 2, 3))}}
    two = {"up": {"kernel": jnp.ones((5, 6)), "bias": jnp.ones(6)}}
    decaying = make_optimizer(replace(RATES, weight_decay=0.1))
    with pytest.raises(ConfigError, match=r"query/kernel .*parameter_axes"):
        decaying.init(three)
    with pytest.raises(ConfigError, match="parameter_axes"):
        partition_specs(three, SIZES)
    with pytest.raises(ConfigError, match="parameter_axes"):
        make_optimizer(replace(RATES, name="muon"))
    assert partition_specs(two, SIZES) == {
        "up/kernel": PartitionSpec(None, "fsdp"),
        "up/bias": PartitionSpec(),
    }
    axes = {"query/kernel": Axes(("embed",), ("heads", "head_dim"))}
    assert partition_specs(three, SIZES, axes=axes)["query/kernel"] == PartitionSpec(None, "tensor")


class TwoTowers(nn.Module):
    """A module whose parameters a method of another name makes."""

    def setup(self):
        self.left, self.right = jf.FeedForward(7), jf.FeedForward(5)

    def score(self, x, y):
        return jnp.sum(self.left(x) * self.right(y))


def test_the_axes_of_a_module_without_a_call_are_those_of_a_method():
    x = jnp.ones((2, 3, 11))
    axes = parameter_axes(TwoTowers(), x, x, method="score")
    assert axes["right/up/kernel"].outputs == ("mlp",) and len(axes) == 8
    assert jf.single().for_model(TwoTowers(), x, x, method="score").axes == axes
