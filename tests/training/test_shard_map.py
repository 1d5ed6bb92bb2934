"""The step under `jax.shard_map` on four devices is the step of one, for both `check_vma`."""

import json

import pytest

from tests.two_processes import finished, start

CODE = """
import json
from functools import partial
import jax, numpy as np, optax
import jaxformer as jf
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
sizes = {"d_model": 8, "d_ff": 14, "num_heads": 2, "dropout_rate": 0.1}
model = jf.DecoderOnly(jf.TransformerConfig(11, num_decoder_layers=1, **sizes))
tokens = np.random.default_rng(0).integers(3, 11, (8, 7), np.int32)
batch = jf.StreamBatch.create(tokens, vocab_size=11)._replace(loss_mask=tokens[:, 1:] % 3 > 0)
params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
optimizer = optax.sgd(0.5)
state = jf.init_train_state(params, optimizer, jax.random.key(1), ema=True)

def own(params, batch, rng):  # counts what differs on no device
    nats, _ = jf.causal_loss(model)(params, batch, rng)
    return nats, jax.numpy.float32(12), {"ones": jax.numpy.float32(1)}

losses = {
    "plain": jf.causal_loss(model), "chunks": jf.causal_loss(model, loss_chunk=5),
    "z_loss": jf.causal_loss(model, z_loss=1e-3), "own": own,
}
for name, parts in (("plain", 1), ("plain", 2), ("chunks", 2), ("z_loss", 1), ("own", 2)):
    options = {"ema_decay": 0.9, "grad_accumulation": parts}
    make = partial(jf.make_train_step, losses[name], optimizer, **options)
    found = [jax.jit(make())(state, batch)]
    step = make(reduce=partial(jax.lax.psum, axis_name="data"))
    for check in (False, True):
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=check
        )
        found.append(jax.jit(mapped)(state, batch))
    (whole, metrics), *others = found
    for other, sums in others:
        differences = jax.tree.map(
            lambda a, b: float(np.abs(a - b).max()), (whole.params, whole.ema),
            (other.params, other.ema),
        )
        ratios = [float(sums[x] / metrics[x]) for x in ("loss", "grad_norm")]
        print(json.dumps([name, max(jax.tree.leaves(differences)), *ratios]))
"""


@pytest.mark.long
def test_the_step_under_shard_map_is_that_of_one_device_whatever_check_vma_is():
    (done,) = finished(start("-c", CODE, devices=4))
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line[0] for line in lines].count("own") == 2 and len(lines) == 10
    for name, difference, loss, norm in lines:
        if name == "own":  # a device counts 12 tokens of its own part
            assert norm == pytest.approx(0.25, rel=1e-5)
            continue
        assert difference < 1e-6, name
        assert [loss, norm] == pytest.approx([1, 1], rel=1e-5), name
