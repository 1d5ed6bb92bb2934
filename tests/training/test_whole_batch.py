"""Losses that are no sums over rows: the same on any division of a batch, or refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from experiments.examples.whole_batch_losses import contrastive_loss, expert_balance
from experiments.harness.training.starting import check_own_loss
from experiments.harness.training.training_config import TrainingConfig
from tests.two_processes import finished, start

CODE = """
import json
from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
import jaxformer as jf
from experiments.examples.whole_batch_losses import contrastive_loss, expert_balance
from jax.sharding import Mesh, PartitionSpec as P

sizes = {"d_model": 8, "d_ff": 14, "num_heads": 2, "num_decoder_layers": 1}
model = jf.DecoderOnly(jf.TransformerConfig(11, **sizes))
tokens = np.random.default_rng(0).integers(3, 11, (8, 7), np.int32)
batch = jf.StreamBatch.create(tokens, vocab_size=11)
params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
optimizer = optax.sgd(0.5)

def balanced(params, batch, rng):
    logits = model.apply({"params": params}, batch.tokens)
    return expert_balance(jax.nn.softmax(logits[..., :3])), jnp.float32(logits[..., 0].size)

losses = {"contrastive": contrastive_loss(model, weight=1.0), "balance": balanced}
for name, loss in losses.items():
    def by(strategy):
        state = strategy.shard_state(jf.init_train_state(params, optimizer, jax.random.key(1)))
        state, metrics = strategy.step(loss, optimizer)(state, strategy.shard_batch(batch))
        return state.params, metrics

    whole, metrics = by(jf.single())
    meshes = {"rows": "data=2,fsdp=2", "tensor": "fsdp=2,tensor=2"}
    found = {kind: by(jf.sharded(jf.make_mesh(text)).for_model(model, tokens))
             for kind, text in meshes.items()}
    step = jf.make_train_step(loss, optimizer, reduce=partial(jax.lax.psum, axis_name="data"))
    state = jf.init_train_state(params, optimizer, jax.random.key(1))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    after, sums = jax.jit(mapped)(state, batch)
    found["shard_map"] = after.params, sums
    parts = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    after, sums = jax.pmap(step, "data", in_axes=(None, 0))(state, parts)
    found["pmap"] = jax.tree.map(lambda x: x[0], (after.params, sums))
    for kind, (other, sums) in found.items():
        pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(other))
        difference = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
        ratios = [float(sums[x]) / float(metrics[x]) for x in ("loss", "tokens")]
        print(json.dumps([name, kind, difference, *ratios]), flush=True)
"""


@pytest.mark.long
def test_a_loss_of_all_rows_is_on_any_division_what_it_is_on_one_device():
    (done,) = finished(start("-c", CODE, devices=4))
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == 2 * 4
    for name, kind, difference, *ratios in lines:
        assert difference < 1e-5 and ratios == pytest.approx([1, 1], rel=1e-5), (name, kind)


CONFIG = jf.TransformerConfig(11, 8, 14, 2, num_decoder_layers=1)
MODEL = jf.DecoderOnly(CONFIG)
BATCH = jf.StreamBatch.create(np.random.default_rng(0).integers(3, 11, (5, 7)), vocab_size=11)


def alone(model, **options):
    """A contrastive loss that takes the rows of its device for all."""
    gathered = contrastive_loss(model, **options)

    def loss(params, batch, rng):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jf, "gather_rows", lambda x: x)
            patch.setattr(jf, "row_numbers", lambda x: jnp.arange(len(x)))
            return gathered(params, batch, rng)

    return loss


def test_a_loss_that_mixes_rows_is_refused_unless_it_gathers_them(random_params):
    params = random_params(MODEL, BATCH.tokens)
    assert jf.check_loss(jf.causal_loss(MODEL), MODEL, BATCH)
    assert jf.check_loss(jf.causal_loss(MODEL, loss_chunk=3), MODEL, BATCH, params=params)
    assert not jf.check_loss(contrastive_loss(MODEL), MODEL, BATCH, params=params)
    with pytest.raises(jf.ConfigError, match=r"no sum over rows.* jf\.gather_rows\(x\)"):
        jf.check_loss(alone(MODEL), MODEL, BATCH, params=params)
    # A count that rows share unevenly: a mean of means is no mean.
    counts = np.arange(6) < np.array([[6], [1], [5], [5], [3]])
    ragged = BATCH._replace(loss_mask=counts)

    def mean(params, batch, rng):
        nats, count = jf.causal_loss(MODEL)(params, batch, rng)
        return nats / count, jnp.float32(1)

    with pytest.raises(jf.ConfigError, match="sum over rows"):
        jf.check_loss(mean, MODEL, ragged, params=params)
    assert jf.check_loss(jf.causal_loss(MODEL), MODEL, ragged, params=params)
    half = jf.DecoderOnly(replace(CONFIG, dtype="bfloat16"))
    assert jf.check_loss(jf.causal_loss(half), half, BATCH, params=params)


@pytest.mark.parametrize(
    ("loss", "parts", "message"),
    [
        (jf.causal_loss(MODEL), 2, None),
        (contrastive_loss(MODEL), 1, None),
        (contrastive_loss(MODEL), 2, "depends on all rows of a batch together"),
        (alone(MODEL), 1, None),  # one device sees all rows
        (alone(MODEL), 2, "no sum over rows"),
    ],
)
def test_a_run_refuses_a_loss_of_ones_own_that_its_division_changes(
    loss, parts, message, random_params
):
    devices = jf.single()
    training = TrainingConfig(loss="my_package:loss", grad_accumulation=parts)
    run = SimpleNamespace(config=SimpleNamespace(training=training), devices=devices)
    step = devices.step(loss, optax.sgd(0.1), grad_accumulation=parts)
    params = jax.tree.map(jnp.asarray, random_params(MODEL, BATCH.tokens))
    args = run, SimpleNamespace(model=MODEL), step, params, BATCH
    if message is None:
        check_own_loss(*args)
    else:
        with pytest.raises(jf.ConfigError, match=message):
            check_own_loss(*args)
    run.config.training = replace(training, loss="")  # the library's losses are known
    check_own_loss(*args)


def test_experts_that_all_tokens_share_are_in_balance(rng):
    alike = jnp.eye(3)[jnp.arange(12).reshape(2, 6) % 3] * 0.9 + 0.1 / 3
    assert float(expert_balance(alike)) == pytest.approx(12 * 1.0, rel=1e-5)
    one = jnp.zeros((2, 6, 3)).at[..., 0].set(1.0)
    assert float(expert_balance(one)) == pytest.approx(12 * 3.0)
