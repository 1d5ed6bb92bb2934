"""Drawn calls of attention, compiled for TPUs that are not here: what is selected compiles.

Run with `pytest -m compiler`; `JAXFORMER_DRAWN=100` compiles a hundred calls in place of nine.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer import AttentionMask
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from tests.compilers.conftest import counts
from tests.compilers.recorded import Recorded

pytestmark = pytest.mark.compiler

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
LENGTHS = [128, 384, 512, 640, 1000, 1024, 1152, 2048, 4096, 8192, 32768]
SIZES = [16, 32, 40, 64, 80, 96, 128, 192, 256, 512]


def drawn(seed):
    """Shapes, mask and further arguments of a call."""
    rng = np.random.default_rng(seed)
    queries = int(rng.choice(LENGTHS))
    keys = queries if rng.random() < 0.7 else int(rng.choice(LENGTHS))
    kv_heads, ratio = int(rng.choice([1, 2, 3, 5, 8, 12])), int(rng.choice([1, 1, 2, 3, 4, 8]))
    size, rate = int(rng.choice(SIZES)), float(rng.choice([0.0, 0.0, 0.1]))
    causal = bool(rng.random() < 0.75)
    mask = {"causal": causal, "offset": keys - queries if causal else 0}
    if causal and rng.random() < 0.4:
        mask["window"] = int(rng.choice([64, 1000, 1024, 4096]))
    return {
        "q": (2, queries, kv_heads * ratio, size),
        "k": (2, keys, kv_heads, size),
        "dtype": str(rng.choice(["bfloat16", "bfloat16", "float32"])),
        "mask": mask,
        "segments": bool(rng.random() < 0.4),
        "rate": rate,
        "softcap": 50.0 if rng.random() < 0.25 else None,
    }


@pytest.mark.parametrize("seed", range(int(os.environ.get("JAXFORMER_DRAWN", "9"))))
def test_a_drawn_call_that_is_selected_compiles_with_its_gradient(tpu_devices, seed):
    call = drawn(seed)
    mesh = Mesh([tpu_devices(TOPOLOGIES[seed % len(TOPOLOGIES)])[0]], ("data",))
    where = NamedSharding(mesh, PartitionSpec())

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    q, k = (leaf(call["dtype"], *call[name]) for name in "qk")
    segments = [leaf(jnp.int32, *x.shape[:2]) for x in (q, k)] if call["segments"] else [None] * 2
    dropout_rng = DropoutRng(leaf(jnp.uint32, 2), leaf(jnp.uint32, 2)) if call["rate"] else None
    auto = Recorded()

    def loss(q, k, v, dropout_rng, segments):
        given = dict(zip(("query_segments", "key_segments"), segments, strict=True))
        mask, dropout = AttentionMask(**call["mask"], **given), None
        if dropout_rng is not None:
            dropout = DropoutMask(dropout_rng, "weights", call["rate"])
        out = auto(q, k, v, mask, scale=0.1, dropout=dropout, softcap=call["softcap"])
        return jnp.sum(out.astype(jnp.float32))

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, dropout_rng, segments).compile()
    assert [name for name, _ in auto.calls] == ["tpu_flash"]
    assert counts(program)["mosaic"] >= 2  # forward, and backward in one part or more
