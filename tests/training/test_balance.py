"""The balance of experts in a loss: its formula, its gradient, and the whole batch on devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.nn.experts import ROUTING
from jaxformer.training.balance import balance_sum
from tests.configs import small
from tests.two_processes import finished, start

B, T, E, K = 3, 7, 5, 2


def test_the_balance_is_one_if_all_experts_are_used_equally_and_e_if_one_is():
    experts = jnp.arange(B * T * K).reshape(B, T, K) % 3  # 42 choices among three experts
    masks, tokens = {"": jnp.ones((B, T), bool)}, jnp.float32(B * T)
    even = {"shares": (jnp.full((B, T, 3), 1 / 3),), "experts": (experts,)}
    np.testing.assert_allclose(balance_sum(even, masks, tokens), B * T, rtol=1e-6)
    one = jnp.zeros((B, T, 3)).at[..., 1].set(1.0)
    collapsed = {"shares": (one,), "experts": (jnp.ones((B, T, 1), int),)}
    np.testing.assert_allclose(balance_sum(collapsed, masks, tokens), 3 * B * T, rtol=1e-6)


def gpt(**changes):
    experts = jf.ExpertOptions(E, top_k=K)
    options = jf.FeedForwardOptions(experts=experts)
    return jf.DecoderOnly(small(num_decoder_layers=2, feed_forward=options, **changes))


@pytest.fixture
def batch(rng):
    batch = jf.StreamBatch.create(rng.integers(0, 17, (B, T + 1)), vocab_size=17)
    return batch._replace(loss_mask=rng.random((B, T)) < 0.7)


@pytest.mark.parametrize("options", [{}, {"loss_chunk": 5}])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_loss_adds_the_mean_balance_of_the_layers_for_each_token(
    batch, random_params, scan_layers, options
):
    model = gpt(scan_layers=scan_layers)
    params = random_params(model, batch.tokens)
    nats, count = jf.causal_loss(model, **options)(params, batch, None)
    total, tokens, sums = jf.causal_loss(model, balance=0.3, **options)(params, batch, None)
    blocks = params if not scan_layers else jf.unstack_blocks(params)
    names = [f"decoder/blocks_{i}/feed_forward/router_logits" for i in range(2)]
    ids = batch.tokens[:, :-1]
    _, values = jf.read_taps(gpt(), blocks, ids, names=names)
    expected = []
    for name in names:
        shares = np.float64(jax.nn.softmax(values[name]))[batch.loss_mask]
        choices = np.argsort(-shares)[:, :K]
        frequency = np.bincount(choices.ravel(), minlength=E) / choices.size
        expected.append(E * np.sum(frequency * shares.mean(0)))
    assert float(tokens) == float(count) == batch.loss_mask.sum()
    np.testing.assert_allclose(sums["balance"] / tokens, np.mean(expected), rtol=1e-5)
    np.testing.assert_allclose(total, nats + 0.3 * sums["balance"], rtol=1e-6)


def test_the_balance_alone_moves_tokens_from_experts_that_have_many(batch, random_params):
    model = gpt()
    params = random_params(model, batch.tokens)

    def balance(params):
        _, tokens, sums = jf.causal_loss(model, balance=1.0)(params, batch, None)
        return sums["balance"] / tokens

    step = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.5 * g, p, jax.grad(balance)(p)))
    first = float(balance(params))
    for _ in range(20):
        params = step(params)
    assert abs(float(balance(params)) - 1.0) < 0.5 * abs(first - 1.0)


def test_a_translation_counts_the_tokens_of_each_side_and_padding_changes_nothing(
    rng, random_params
):
    options = jf.FeedForwardOptions(experts=jf.ExpertOptions(E, top_k=K))
    config = small(num_encoder_layers=1, num_decoder_layers=1, feed_forward=options)
    model = jf.EncoderDecoder(config)
    source, target = rng.integers(4, 17, (B, 5)), rng.integers(4, 17, (B, T))
    source[1, 3:] = target[2, 4:] = jf.PAD
    loss = jax.jit(jf.seq2seq_loss(model, pad=jf.PAD, balance=0.5))
    params = random_params(model, source, target)
    padded = [np.pad(x, ((0, 0), (0, 3)), constant_values=jf.PAD) for x in (source, target)]
    short, long = (jf.PairBatch.create(*pair, vocab_size=17) for pair in ((source, target), padded))
    total, _, sums = loss(params, short, None)
    same, _, same_sums = loss(params, long, None)
    np.testing.assert_allclose(same, total, rtol=1e-6)
    np.testing.assert_allclose(same_sums["balance"], sums["balance"], rtol=1e-6)


def test_a_balance_of_a_model_without_experts_is_refused(batch, random_params):
    model = jf.DecoderOnly(small(num_decoder_layers=1))
    params = random_params(model, batch.tokens)
    with pytest.raises(jf.ConfigError, match="balance"):
        jf.causal_loss(model, balance=0.1)(params, batch, None)


def test_nothing_is_recorded_unless_it_is_asked_for(batch):
    model = gpt()
    variables = jax.eval_shape(model.init, jax.random.key(0), batch.tokens)
    assert set(variables) == {"params"}
    assert ROUTING not in jax.eval_shape(
        lambda v: model.apply(v, batch.tokens, mutable=["intermediates"])[1], variables
    )


CODE = """
import json
from functools import partial
import jax, numpy as np, optax
import jaxformer as jf
from jax.sharding import Mesh, PartitionSpec as P

options = jf.FeedForwardOptions(experts=jf.ExpertOptions(5, top_k=2))
sizes = {"d_model": 8, "d_ff": 14, "num_heads": 2}
config = jf.TransformerConfig(11, num_decoder_layers=1, feed_forward=options, **sizes)
model = jf.DecoderOnly(config)
tokens = np.random.default_rng(0).integers(3, 11, (8, 7), np.int32)
batch = jf.StreamBatch.create(tokens, vocab_size=11)._replace(loss_mask=tokens[:, 1:] % 3 > 0)
params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
optimizer = optax.sgd(0.5)
state = jf.init_train_state(params, optimizer, jax.random.key(1))
loss = jf.causal_loss(model, balance=0.7)
whole, metrics = jax.jit(jf.make_train_step(loss, optimizer))(state, batch)
mesh = Mesh(np.array(jax.devices()), ("rows",))
found = {}
step = jf.make_train_step(loss, optimizer, reduce=partial(jax.lax.psum, axis_name="rows"))
for check in (False, True):
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("rows")), out_specs=(P(), P()), check_vma=check
    )
    found[str(check)] = jax.jit(mapped)(state, batch)
parts = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
many, sums = jax.pmap(step, axis_name="rows", in_axes=(None, 0))(state, parts)
found["pmap"] = jax.tree.map(lambda x: x[0], (many, sums))
for name, (other, sums) in found.items():
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), whole.params, other.params)
    ratio = float(sums["balance"] / metrics["balance"])
    print(json.dumps([name, max(jax.tree.leaves(gaps)), ratio]))
"""


@pytest.mark.long
def test_the_balance_on_four_devices_is_that_of_the_whole_batch():
    (done,) = finished(start("-c", CODE, devices=4))
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [name for name, *_ in lines] == ["False", "True", "pmap"]
    for name, gap, ratio in lines:
        assert gap < 1e-6, name
        assert abs(ratio - 1.0) < 1e-6, name
