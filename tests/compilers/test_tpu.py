"""Programs compiled for TPUs that are not here. Compiling is not running: no speed, no results.

Run with `pytest -m compiler` on Python 3.12 with the extra `compilers`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer import AttentionMask
from jaxformer.distributed import make_mesh, sharded, single
from jaxformer.nn.blocks import REMAT
from jaxformer.ops.attention import tpu_splash
from tests.compilers.conftest import CONFIG, compiled_step, counts

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4"])
@pytest.mark.parametrize("axes", ["data=2,fsdp=4,tensor=2", "fsdp=16"])
def test_a_sharded_step_compiles_with_flash_attention_in_each_layer(tpu_devices, topology, axes):
    mesh = make_mesh(axes, tpu_devices(topology))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    program, used = compiled_step(sharded(mesh), 16, rows)
    assert used == {"tpu_splash"}
    # forward, and backward for the queries and for keys and values
    assert counts(program)["mosaic"] == 3 * CONFIG.num_decoder_layers


@pytest.mark.parametrize("remat", ["none", "attention", "matmuls", "blocks"])
def test_flash_attention_is_kept_under_every_remat_policy(tpu_devices, remat):
    strategy = single(tpu_devices("v5e:2x2")[0])
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    program, used = compiled_step(strategy, 2, sharding, block=REMAT[remat])
    assert used == {"tpu_splash"}
    kernels = 3 if remat == "none" else 4  # the forward kernel runs a second time
    assert counts(program)["mosaic"] == kernels * CONFIG.num_decoder_layers


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("queries, keys, heads, size", [(640, 640, 4, 64), (128, 1152, 6, 128)])
def test_attention_compiles_for_each_chip(tpu_devices, topology, queries, keys, heads, size):
    mesh = Mesh([tpu_devices(topology)[0]], ("data",))
    where = NamedSharding(mesh, PartitionSpec())
    q = jax.ShapeDtypeStruct((2, queries, heads, size), jnp.bfloat16, sharding=where)
    k = jax.ShapeDtypeStruct((2, keys, 2, size), jnp.bfloat16, sharding=where)
    mask = AttentionMask(causal=True, offset=keys - queries)

    def loss(q, k, v):
        return jnp.sum(tpu_splash(q, k, v, mask, scale=0.125).astype(jnp.float32))

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
    assert counts(program)["mosaic"] == 3
