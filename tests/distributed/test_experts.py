"""Experts on meshes of four devices are those of one: parameters after three steps by SGD."""

import json

import pytest

from tests.two_processes import finished, start

CODE = """
import json, sys
import jax, numpy as np, optax
import jaxformer as jf
from jaxformer.distributed import make_mesh
from jaxformer.training.parameters import flatten

jax.config.update("jax_default_matmul_precision", "highest")
rng = np.random.default_rng(0)
tokens = rng.integers(0, 28, (8, 13), np.int32)
batch = jf.StreamBatch.create(tokens, vocab_size=28)._replace(loss_mask=rng.random((8, 12)) < 0.8)

def three_steps(devices, scan_layers, fields, at):
    options = jf.FeedForwardOptions(
        "silu", gated=True, dropout_rate=0.2, experts=jf.ExpertOptions(**fields)
    )
    model = jf.DecoderOnly(jf.TransformerConfig(
        28, d_model=12, d_ff=20, num_heads=4, num_decoder_layers=1 + scan_layers,
        norm=jf.NormOptions(placement="pre"), scan_layers=scan_layers, dropout_rate=0.1,
        feed_forward=options, embeddings=jf.EmbeddingOptions(tied="output"),
    ))
    devices, optimizer = devices.for_model(model), optax.sgd(0.5)
    def make_state():
        params = model.init(jax.random.key(0), tokens[:2])["params"]
        return jf.init_train_state(params, optimizer, jax.random.key(1))
    step = devices.step(jf.causal_loss(model, balance=0.3), optimizer, gather_at=at)
    state = devices.init(make_state)
    for _ in range(3):
        state, metrics = step(state, devices.shard_batch(batch))
    up = next(x for path, x in flatten(state.params).items() if path.endswith("forward/up/kernel"))
    sums = [float(metrics[name]) for name in ("loss", "balance")]
    return flatten(devices.gather(state.params)), sums, up.addressable_shards[0].data.shape

for scan_layers, fields, meshes in json.loads(sys.argv[1]):
    expected, sums, _ = three_steps(jf.single(), scan_layers, fields, "step")
    for mesh in meshes:
        at = "use" if "fsdp" in mesh else "step"
        found, on_mesh, part = three_steps(jf.sharded(make_mesh(mesh)), scan_layers, fields, at)
        gap = max(float(np.abs(expected[path] - found[path]).max()) for path in expected)
        ratios = [a / b for a, b in zip(on_mesh, sums)]
        print(json.dumps([mesh, gap, *ratios, part]))
"""
CASES = {
    "dense": [[False, {"num_experts": 4, "top_k": 2}, ["tensor=4", "fsdp=2,tensor=2"]]],
    "ragged": [
        [
            True,
            {"num_experts": 8, "top_k": 3, "dispatch": "ragged", "shared_d_ff": 8},
            ["fsdp=2,tensor=2", "sequence=2,tensor=2", "data=2,sequence=2"],
        ]
    ],
    "slots": [
        [
            False,
            {"num_experts": 6, "top_k": 2, "capacity_factor": 0.7, "jitter": 0.1},
            ["data=2,tensor=2", "tensor=4"],
        ]
    ],
}
PARTS = {  # of [E, D, F], after stacked layers
    ("dense", "tensor=4"): [1, 12, 20],
    ("dense", "fsdp=2,tensor=2"): [2, 12, 10],
    ("ragged", "fsdp=2,tensor=2"): [2, 4, 12, 10],
    ("slots", "tensor=4"): [6, 12, 5],  # four devices do not divide six experts
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_three_steps_on_four_devices_are_those_of_one(name):
    (done,) = finished(start("-c", CODE, json.dumps(CASES[name]), devices=4))
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == sum(len(meshes) for *_, meshes in CASES[name])
    for mesh, gap, loss, balance, part in lines:
        assert gap < 1e-5, mesh
        assert abs(loss - 1) < 1e-6 and abs(balance - 1) < 1e-6, mesh
        assert part == PARTS.get((name, mesh), part), mesh
