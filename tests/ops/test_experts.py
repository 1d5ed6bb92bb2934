"""All ways in which tokens reach their experts compute one sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.experts import Choice, ExpertLayer, mix_experts

B, T, D, F, E, K = 2, 7, 5, 11, 3, 2


@pytest.fixture
def call(rng):
    """Layers of three experts, tokens, their choices and the factors of their hidden layers."""
    layers = {
        "up": (rng.normal(size=(E, D, F)), rng.normal(size=(E, F))),
        "down": (rng.normal(size=(E, F, D)), rng.normal(size=(E, D))),
    }
    layers = {name: ExpertLayer(*map(jnp.float32, pair)) for name, pair in layers.items()}
    x = jnp.float32(rng.normal(size=(B, T, D)))
    experts = np.array([[rng.permutation(E)[:K] for _ in range(T)] for _ in range(B)])
    choice = Choice(jnp.asarray(experts), jnp.float32(rng.random((B, T, K))))
    return layers, x, choice, jnp.float32(rng.random((B, T, F)))


def network(rows, keep, multiply):
    hidden = jnp.tanh(multiply(rows, "up"))
    return multiply(hidden if keep is None else hidden * keep, "down")


def plain_sum(layers, x, choice, keep=None, slots=None):
    """The sum token by token and choice by choice, in float64."""
    x, experts, weights = (np.asarray(a) for a in (x, choice.experts, choice.weights))
    total = np.zeros(x.shape)
    for row in range(B):
        taken = dict.fromkeys(range(E), 0)
        for token in range(T):
            for expert, weight in zip(experts[row, token], weights[row, token], strict=True):
                taken[expert] += 1
                if slots is not None and taken[expert] > slots:
                    continue
                (up, b), (down, c) = (map(np.float64, layers[name]) for name in ("up", "down"))
                up, b, down, c = up[expert], b[expert], down[expert], c[expert]
                hidden = np.tanh(x[row, token] @ up + b)
                hidden = hidden if keep is None else hidden * np.asarray(keep)[row, token]
                total[row, token] += weight * (hidden @ down + c)
    return total


WAYS = {
    "dense": {"dispatch": "dense"},
    "ragged": {"dispatch": "ragged"},
    "auto": {},
    "room for all": {"slots": T},
    "two slots": {"slots": 2},
}


@pytest.mark.parametrize("has_keep", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_computes_the_sum_of_the_chosen_experts(call, way, has_keep):
    layers, x, choice, keep = call
    keep = keep if has_keep else None
    found = mix_experts(network, layers, x, choice, keep=keep, **WAYS[way])
    expected = plain_sum(layers, x, choice, keep, WAYS[way].get("slots"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def one_layer(layers, x, chosen, weights):
    """The sum of a single product of each token with its experts."""

    def only(rows, keep, multiply):
        return multiply(rows, "up")

    return mix_experts(only, layers, x, Choice(chosen, weights))


def arrays_of(experts, size):
    """The arguments of `one_layer` for 2 rows of 3 tokens, each with 2 experts."""

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = {"up": ExpertLayer(leaf(jnp.float32, experts, size, size), None)}
    choice = leaf(jnp.int32, 2, 3, 2), leaf(jnp.float32, 2, 3, 2)
    return layers, leaf(jnp.float32, 2, 3, size), *choice


@pytest.mark.parametrize(
    ("experts", "size", "tensor", "is_sorted"),
    [(4, 2048, 1, False), (16, 512, 2, False), (16, 512, 1, True), (16, 1024, 2, True)],
)
def test_experts_are_sorted_where_products_with_all_of_a_device_take_longer(
    experts, size, tensor, is_sorted
):
    mesh = jax.sharding.AbstractMesh((tensor,), ("tensor",), (jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(one_layer)(*arrays_of(experts, size)))
    assert ("ragged_dot" in program) == is_sorted


@pytest.mark.parametrize(
    ("platform", "is_sorted"), [("tpu", True), ("cuda", False), ("cpu", False)]
)
def test_tokens_are_sorted_only_where_a_compiler_has_products_of_sorted_rows(platform, is_sorted):
    traced = jax.jit(one_layer).trace(*arrays_of(16, 1024))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.sort" in program) == is_sorted


@pytest.mark.parametrize("way", ["ragged", "room for all"])
def test_the_gradient_is_that_of_the_dense_product(call, way):
    layers, x, choice, keep = call

    def slope(options):
        def total(layers, x, weights, keep):
            chosen = choice._replace(weights=weights)
            return jnp.sum(jnp.sin(mix_experts(network, layers, x, chosen, keep=keep, **options)))

        return jax.jit(jax.grad(total, (0, 1, 2, 3)))(layers, x, choice.weights, keep)

    expected = slope(WAYS["dense"])
    for given, wanted in zip(*map(jax.tree.leaves, (slope(WAYS[way]), expected)), strict=True):
        np.testing.assert_allclose(given, wanted, atol=2e-5)


@pytest.mark.parametrize("way", ["dense", "ragged", "two slots"])
def test_an_expert_without_tokens_has_no_gradient(call, way):
    layers, x, choice, _ = call
    choice = choice._replace(experts=jnp.tile(jnp.array([0, 2]), (B, T, 1)))

    def total(layers):
        return jnp.sum(mix_experts(network, layers, x, choice, **WAYS[way]))

    for leaf in jax.tree.leaves(jax.grad(total)(layers)):
        assert not np.any(leaf[1]) and np.any(leaf[0]) and np.any(leaf[2])
