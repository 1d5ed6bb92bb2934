"""Compilers of accelerators that are not here: devices of a topology, and what programs contain."""

import os
import re
from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

from jaxformer import AutoAttention, DecoderOnly, OptimizerConfig, TransformerConfig
from jaxformer.nn.blocks import REMAT
from jaxformer.text.data import StreamBatch
from jaxformer.training import causal_loss, init_train_state, make_optimizer

# libtpu reads them when it is loaded: no metadata server is asked, several processes may load it.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture(autouse=True)
def precision_of_users():
    """Products as users' programs have them; the other tests ask for exact ones."""
    with jax.default_matmul_precision("default"):
        yield


@pytest.fixture(scope="session")
def tpu_devices():
    """tpu_devices("v5e:4x4") -> the devices of that topology, to compile for."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jaxformer[compilers]' (Python 3.12)")
    from jax.experimental import topologies

    os.environ.update(LIBTPU)

    def devices(name: str) -> list[jax.Device]:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)

    return devices


# XLA's description of a GPU that is not here, from NVIDIA's public numbers.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="session")
def h100s():
    """h100s(4) -> that many H100s of one host, to compile for."""
    if find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the CUDA plugin is not installed: pip install 'jaxformer[cuda]'")
    from jax.experimental import topologies

    def devices(count: int) -> list[jax.Device]:
        return list(
            topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=H100, topology=f"1x1x{count}"
            ).devices
        )

    return devices


KERNELS = {"mosaic": "tpu_custom_call", "triton": "__gpu$xla.gpu.triton", "cudnn": "__cudnn$fmha"}


def counts(compiled: jax.stages.Compiled) -> Counter[str]:
    """How often each collective, and a kernel of Mosaic, Triton or cuDNN, is in a program."""
    kinds = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
    text = compiled.as_text() or ""
    found = Counter(match[0] for match in re.findall(kinds, text))
    for name, target in KERNELS.items():
        found[name] = text.count(f'custom_call_target="{target}')
    return found


CONFIG = TransformerConfig(
    vocab_size=1024,
    d_model=256,
    d_ff=512,
    num_heads=4,
    num_decoder_layers=2,
    max_len=512,
    positions="learned",
    norm_placement="pre",
    tied_embeddings="output",
    dtype="bfloat16",
)


def compiled_step(strategy, rows, sharding, *, block=REMAT["none"], config=CONFIG, parts=1):
    """The train step of a GPT on packed documents, and the attention functions it uses."""
    attention = AutoAttention()
    model = DecoderOnly(config, attention, block)
    optimizer = make_optimizer(OptimizerConfig())

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((2, 128), jnp.int32))["params"]
        return init_train_state(params, optimizer, jax.random.key(1))

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    length = config.max_len
    batch = StreamBatch(
        tokens=leaf(jnp.int32, rows, length + 1),
        loss_mask=leaf(jnp.bool_, rows, length),
        example_ids=leaf(jnp.int32, rows),
        segments=leaf(jnp.int32, rows, length + 1),
        positions=leaf(jnp.int32, rows, length + 1),
    )
    step = strategy.step(causal_loss(model), optimizer, grad_accumulation=parts)
    program = step.lower(strategy.abstract(make_state), batch).compile()
    return program, {each.name for each in attention.selections if each.spec.queries == length}
