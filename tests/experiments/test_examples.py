"""Public modules do as a part of other people's code: the examples of experiments/examples."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from experiments.examples import (
    custom_modules,
    custom_sharding,
    inside_linen,
    inside_nnx,
    many_seeds,
    series,
)
from experiments.examples.plain_attention import dependencies, random_weights, self_attention
from jaxformer.distributed import RULES, partition_specs
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.masks import AttentionMask
from jaxformer.training.train_step import init_train_state, make_train_step

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MODELS = custom_modules.models()


def test_whether_a_series_rises_first_is_its_label():
    batch = series.random_batch(3, rows=7)
    for values, label in zip(batch.series[..., 0], batch.label, strict=True):
        assert (values.argmax() < values.argmin()) == label


def test_our_encoder_learns_inside_a_linen_model_of_ones_own():
    model, batch = inside_linen.SeriesModel(), series.random_batch(2, rows=8)
    optimizer = optax.adam(1e-2)
    step = jax.jit(make_train_step(series.loss_of(model), optimizer))
    params = jax.jit(model.init)(jax.random.key(0), batch.series)["params"]
    assert set(params) == {"enter", "encoder", "classes"}
    state, losses = init_train_state(params, optimizer, jax.random.key(1)), []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    assert losses[-1] < 0.5 * losses[0]
    assert jnp.any(
        state.params["encoder"]["blocks_0"]["attention"]["query"]["kernel"]
        != params["encoder"]["blocks_0"]["attention"]["query"]["kernel"]
    )


@pytest.mark.slow
def test_our_encoder_learns_inside_an_nnx_model_of_ones_own(assert_equal):
    batch = series.random_batch(2, rows=8)
    model = inside_nnx.SeriesModel(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    linen = inside_linen.SeriesModel()
    before = nnx.jit(lambda model: model(batch.series))(model)
    assert_equal(before, jax.jit(linen.apply)({"params": params}, batch.series))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(inside_nnx.update(model, optimizer, batch)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (AttentionMask(), np.ones((5, 5), bool)),
        (AttentionMask(causal=True), np.tri(5, dtype=bool)),
        (
            AttentionMask(causal=True, window=2),
            np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool),
        ),
    ],
)
def test_the_derivative_of_plain_attention_is_zero_where_the_mask_is(rng, mask, expected):
    weights = random_weights(jax.random.key(0), 7, heads=2, size=3)
    x = rng.normal(size=(5, 7)).astype(np.float32)
    found = dependencies(lambda x: self_attention(weights, x[None], mask)[0], x)
    assert np.array_equal(found, expected)


def test_plain_attention_is_the_modules(rng, assert_equal):
    weights = random_weights(jax.random.key(0), 8, heads=2, size=3)
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    out = rng.normal(size=(2, 3, 8)).astype(np.float32)
    params = {name: {"kernel": kernel} for name, kernel in (weights | {"out": out}).items()}

    def attend(module, x):
        return module(x, module.keys_values(x), AttentionMask(causal=True))

    module = MultiHeadAttention(num_heads=2, head_dim=3, qkv_bias=False, use_bias=False)
    ours = module.apply({"params": params}, x, method=attend)
    plain = self_attention(weights, x, AttentionMask(causal=True))
    assert_equal(ours, jnp.einsum("BTNH,NHD->BTD", plain, out))


@pytest.fixture(scope="module")
def logits(random_params):
    """Of each model with parts of its own: tokens, and its logits at once and one by one."""
    tokens = custom_modules.repeating(0, rows=2, length=6).tokens
    found = {}
    for name, model in MODELS.items():
        params = random_params(model, tokens)
        variables = {"params": jax.tree.map(jnp.asarray, params)}

        def both(variables, model=model):
            def step(cache, column):
                one, cache = model.apply(
                    variables, column[:, None, None], cache, method="decode_step"
                )
                return cache, one[:, 0, 0]

            _, apart = jax.lax.scan(step, model.init_cache(2, max_length=7), tokens.T)
            return model.apply(variables, tokens), apart.swapaxes(0, 1)

        found[name] = jax.tree.map(np.asarray, jax.jit(both)(variables))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_ones_own_decodes_as_it_trains(logits, assert_equal, name):
    whole, apart = logits[name]
    assert_equal(apart, whole)


def test_each_part_of_ones_own_changes_the_function(logits):
    plain, _ = logits["standard"]
    for name in set(MODELS) - {"standard"}:
        assert np.abs(logits[name][0] - plain).max() > 1e-2


def test_cosine_attention_does_not_care_how_long_queries_are(rng, assert_equal):
    q, k, v = rng.normal(size=(3, 2, 5, 3, 4)).astype(np.float32)

    @jax.jit
    def run():
        cosine, sharper = custom_modules.cosine_attention(4.0), custom_modules.cosine_attention(8.0)
        mask = AttentionMask(causal=True)
        found = cosine(q, k, v, mask, scale=0.5), cosine(7 * q, k / 3, v, mask, scale=0.1)
        return *found, sharper(q, k, v, mask, scale=0.5)

    found, longer, sharper = run()
    assert_equal(longer, found)
    assert np.abs(sharper - found).max() > 1e-2


def test_distances_that_have_learned_nothing_are_no_positions(random_params, assert_equal):
    tokens = custom_modules.repeating(0, rows=2, length=5).tokens
    model, plain = MODELS["custom positions"], MODELS["standard"]
    params = random_params(model, tokens)
    table = {"decoder": params["decoder"] | {"positions": {"table": np.zeros((2, 9), np.float32)}}}

    @jax.jit
    def run():
        flat, learned = (model.apply({"params": p}, tokens) for p in (params | table, params))
        return flat, learned, plain.apply({"params": params}, tokens)

    flat, learned, expected = run()
    assert_equal(flat, expected)
    assert np.abs(learned - flat).max() > 1e-2


def test_a_parallel_block_refuses_to_read_a_source():
    config = replace(custom_modules.SIZES, num_encoder_layers=1)
    model = EncoderDecoder(config, block=custom_modules.parallel_block)
    with pytest.raises(ConfigError, match="a parallel block has no cross-attention"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2), int), jnp.ones((1, 2), int))


def test_a_repeating_row_is_known_from_its_third_token_on():
    batch = custom_modules.repeating(1)
    assert np.array_equal(batch.tokens[:, 3:], batch.tokens[:, :-3])
    assert not batch.loss_mask[:, :2].any() and batch.loss_mask[:, 2:].all()


def test_rules_of_ones_own_come_first_and_the_packages_follow():
    params = jax.eval_shape(custom_sharding.make_state).params
    sizes = {"data": 1, "fsdp": 2, "tensor": 2}
    specs = partition_specs(params, (*custom_sharding.CUSTOM_RULES, *RULES), sizes)
    theirs = partition_specs(params, RULES, sizes)
    assert specs["enter/kernel"] == P(None, "fsdp")
    assert specs["classes/kernel"] == P(("fsdp", "tensor"))
    assert specs["encoder/blocks_0/feed_forward/up/kernel"] == P(None, "tensor")
    assert theirs["encoder/blocks_0/feed_forward/up/kernel"] == P("fsdp", "tensor")
    changed = {path for path in specs if specs[path] != theirs[path]}
    assert changed <= {
        "enter/kernel",
        "classes/kernel",
        "encoder/blocks_0/feed_forward/up/kernel",
    }


@pytest.mark.slow
def test_four_devices_under_rules_of_ones_own_learn_what_one_does(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.examples.custom_sharding", "--steps", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *layout, four, one = done.stdout.splitlines()
    parts = {line.split()[0]: json.loads(line.split(" -> ")[1]) for line in layout}
    assert parts["classes/kernel"] == [4, 2]
    assert parts["encoder/blocks_0/attention/query/kernel"] == [8, 1, 8]
    losses = [[float(word) for word in line.split("losses")[1].split()] for line in (four, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[0])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("example", [inside_linen, inside_nnx])
def test_an_example_answers_series_it_has_not_seen(capsys, example):
    example.main(inside_linen.SeriesOptions())
    share = capsys.readouterr().out.split("accuracy on new series: ")[1]
    assert float(share.split("%")[0]) > 75.0


@pytest.mark.slow
def test_order_is_learned_by_a_position_scheme_of_ones_own(capsys):
    custom_modules.main(custom_modules.CustomModulesOptions())
    lines = capsys.readouterr().out.splitlines()
    last = [float(line.split(" -> ")[1].split()[0]) for line in lines]
    assert len(last) == 4
    assert last[2] < 0.1 < min(last[0], last[1], last[3])


def test_a_seed_learns_in_one_program_with_others_what_it_learns_alone():
    options = many_seeds.ManySeedsOptions(steps=3, batch_size=3, seq_len=7, d_model=16)
    together, alone = (many_seeds.train(seeds, options).losses for seeds in ([2, 5, 7], [5]))
    np.testing.assert_allclose(together[1], alone[0], rtol=1e-4)
    assert len(set(together.tolist())) == 3
