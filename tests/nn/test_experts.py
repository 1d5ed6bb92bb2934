"""A feed-forward network of experts: its equations, in a recipe and alone, in decoding."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import jaxformer as jf
from jaxformer.nn.experts import ROUTING
from jaxformer.nn.remat import REMAT
from jaxformer.nn.rounded_parameters import rounded_matrices
from jaxformer.ops.experts import EXPERT_PRODUCTS
from jaxformer.training.parameters import flatten
from tests.configs import small

B, T, D, F, E, K, S = 2, 7, 5, 11, 13, 3, 17
SIZES = {"d_ff": F, "num_experts": E, "top_k": K}
OPTIONS = jf.ExpertOptions(5, top_k=3, shared_d_ff=7)


@pytest.fixture
def x(rng):
    return jnp.float32(rng.normal(size=(B, T, D)))


def plain_ffn(params, x):
    def dense(name, x):
        return x @ params[name]["kernel"] + params[name].get("bias", 0.0)

    gate = dense("gate", x)
    return dense("down", gate / (1.0 + np.exp(-gate)) * dense("up", x))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_the_output_is_the_weighted_sum_of_the_chosen_and_the_shared_expert(
    x, random_params, normalize, use_bias
):
    model = jf.Experts(
        **SIZES,
        normalize=normalize,
        shared_d_ff=S,
        activation="silu",
        gated=True,
        use_bias=use_bias,
    )
    params = random_params(model, x)
    found = model.apply({"params": params}, x)
    plain = jax.tree.map(np.float64, params)
    names = ("gate", "up", "down")
    for row in np.ndindex(B, T):
        token = np.float64(x[row])
        shares = softmax(token @ plain["router"]["kernel"])
        chosen = np.argsort(-shares)[:K]
        weights = shares[chosen] / (shares[chosen].sum() if normalize else 1.0)
        expected = plain_ffn(plain["shared"], token)
        for expert, weight in zip(chosen, weights, strict=True):
            of_expert = {n: {k: v[expert] for k, v in plain[n].items()} for n in names}
            expected = expected + weight * plain_ffn(of_expert, token)
        np.testing.assert_allclose(found[row], expected, atol=2e-5)


def test_a_recipe_and_a_maker_of_feed_forwards_give_the_same_model(random_params):
    ids = np.random.default_rng(1).integers(0, 17, (B, T))
    options = jf.FeedForwardOptions("silu", gated=True, experts=OPTIONS)
    config = small(num_decoder_layers=2, feed_forward=options)
    model = jf.DecoderOnly(config)
    params = random_params(model, ids)
    alone = partial(jf.Block, make_feed_forward=partial(jf.Experts, **vars(OPTIONS)))
    other = jf.DecoderOnly(
        replace(config, feed_forward=replace(options, experts=None)), block=alone
    )
    np.testing.assert_array_equal(*(each.apply({"params": params}, ids) for each in (model, other)))
    shape = params["decoder"]["blocks_1"]["feed_forward"]["up"]["kernel"].shape
    assert shape == (5, 12, 13)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(jf.Experts, F, 3, top_k=5), ["top_k=5", "num_experts=3"]),
        (partial(jf.ExpertOptions, 3, top_k=5), ["top_k=5", "num_experts=3"]),
        (partial(jf.Experts, F, capacity_factor=1.0, dispatch="dense"), ["capacity_factor=1.0"]),
        (partial(jf.Experts, F, dispatch="sparse"), ["dispatch='sparse'", "ragged"]),
        (partial(jf.Experts, F, jitter=1.0), ["jitter=1.0"]),
        (
            partial(
                jf.Block,
                2,
                F,
                feed_forward_options=jf.FeedForwardOptions(experts=OPTIONS),
                make_feed_forward=jf.Experts,
            ),
            ["make_feed_forward", "experts"],
        ),
    ],
)
def test_choices_that_contradict_each_other_are_refused(make, words):
    with pytest.raises(jf.ConfigError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_jitter_and_capacity_are_for_training_alone(x, random_params):
    model = jf.Experts(**SIZES, jitter=0.5, capacity_factor=0.3)
    params, rng = random_params(model, x), jf.DropoutRng(jax.random.key(3), jnp.arange(B))
    plain = jf.Experts(**SIZES).apply({"params": params}, x)
    np.testing.assert_allclose(model.apply({"params": params}, x), plain, atol=1e-5)
    trained = model.apply({"params": params}, x, rng)
    assert not np.allclose(trained, plain)
    last = jf.DropoutRng(rng.key, rng.example_ids[1:])  # the masks of an example in any batch
    np.testing.assert_allclose(
        model.apply({"params": params}, x[1:], last)[0], trained[1], atol=1e-5
    )


@pytest.mark.parametrize("dispatch", ["dense", "ragged"])
def test_dropout_of_the_hidden_layer_is_the_same_for_each_dispatch(x, random_params, dispatch):
    rng = jf.DropoutRng(jax.random.key(3), jnp.arange(B))
    model = jf.Experts(**SIZES, dropout_rate=0.4, dispatch=dispatch)
    params = random_params(model, x)
    in_slots = model.clone(dispatch="auto", capacity_factor=100.0)
    found, expected = (each.apply({"params": params}, x, rng) for each in (model, in_slots))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.allclose(found, model.apply({"params": params}, x))


def gpt(**changes):
    options = jf.FeedForwardOptions(experts=OPTIONS)
    return jf.DecoderOnly(small(num_decoder_layers=2, feed_forward=options, **changes))


def test_products_with_experts_are_kept_where_products_with_weights_are(random_params, capsys):
    options = replace(OPTIONS, dispatch="ragged", shared_d_ff=None)
    feed_forward = jf.FeedForwardOptions("silu", gated=True, experts=options)
    config = small(num_decoder_layers=2, feed_forward=feed_forward)
    ids = np.random.default_rng(1).integers(0, 17, (B, T))
    params = random_params(jf.DecoderOnly(config), ids)
    for remat, kept in {"matmuls": 3 * 2, "blocks": 0}.items():
        model = jf.DecoderOnly(config, block=REMAT[remat])

        def loss(params, model=model):
            return model.apply({"params": params}, ids).var()

        jax.ad_checkpoint.print_saved_residuals(loss, params)
        assert capsys.readouterr().out.count(EXPERT_PRODUCTS) == kept


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_model_of_experts_decodes_what_it_computes_at_once(random_params, scan_layers):
    model = gpt(scan_layers=scan_layers)
    ids = np.random.default_rng(1).integers(0, 17, (B, T))
    params = random_params(model, ids)
    whole = model.apply({"params": params}, ids)
    cache = model.apply({"params": params}, B, max_length=T, num_beams=2, method="init_cache")
    step = jax.jit(partial(model.apply, method="decode_step"))
    for position in range(T):
        tokens = jnp.broadcast_to(ids[:, None, position : position + 1], (B, 2, 1))
        logits, cache = step({"params": params}, tokens, cache)
        for beam in range(2):
            np.testing.assert_allclose(logits[:, beam, 0], whole[:, position], atol=2e-5)


def test_stacked_blocks_are_the_same_function(random_params):
    model, ids = gpt(), np.random.default_rng(1).integers(0, 17, (B, T))
    params = random_params(model, ids)
    stacked = jf.stack_blocks(params)
    scanned = gpt(scan_layers=True)
    np.testing.assert_allclose(
        scanned.apply({"params": stacked}, ids), model.apply({"params": params}, ids), atol=1e-5
    )
    _, recorded = scanned.apply({"params": stacked}, ids, mutable=[ROUTING])
    _, of_blocks = model.apply({"params": params}, ids, mutable=[ROUTING])
    blocks = of_blocks[ROUTING]["decoder"]
    (found,) = recorded[ROUTING]["decoder"]["stacked_blocks"]["feed_forward"]["experts"]
    expected = [blocks[f"blocks_{i}"]["feed_forward"]["experts"][0] for i in range(2)]
    np.testing.assert_array_equal(found, expected)


def test_the_router_reads_float32_and_the_experts_are_rounded_once(random_params):
    model = gpt(dtype="bfloat16")
    params = random_params(model, np.ones((B, T), np.int32))
    rounded = rounded_matrices(model, params)
    of_block = {
        path.removeprefix("decoder/blocks_0/feed_forward/"): str(dtype)
        for path, dtype in rounded.items()
        if "blocks_0/feed_forward" in path
    }
    assert of_block == dict.fromkeys(
        ("up/kernel", "down/kernel", "shared/up/kernel", "shared/down/kernel"), "bfloat16"
    )


def test_a_router_is_read_and_replaced_by_name(random_params):
    model, ids = gpt(), np.random.default_rng(1).integers(0, 17, (B, T))
    params = random_params(model, ids)
    name = "decoder/blocks_0/feed_forward/router_logits"
    _, values = jf.read_taps(model, params, ids, names=[name])
    assert values[name].shape == (B, T, 5)
    same = jf.Patched(model, {name: lambda logits: logits})
    first = jf.Patched(model, {name: lambda logits: jnp.zeros_like(logits).at[..., 0].set(9.0)})
    logits = model.apply({"params": params}, ids)
    np.testing.assert_array_equal(same.apply({"params": params}, ids), logits)
    assert not np.allclose(first.apply({"params": params}, ids), logits)


def test_each_expert_begins_with_the_variance_of_a_matrix_of_its_own(x):
    model = jf.Experts(d_ff=101, num_experts=3, top_k=2)
    params = flatten(model.init(jax.random.key(0), jnp.ones((1, 1, 97)))["params"])
    deviation = np.sqrt(2.0 / (97 + 101))  # Glorot and Bengio 2010
    for expert in params["up/kernel"]:
        assert 0.95 < np.std(expert) / deviation < 1.05
    assert not np.allclose(params["up/kernel"][0], params["up/kernel"][1])
