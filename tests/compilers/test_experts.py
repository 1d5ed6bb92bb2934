"""Steps of a model with experts, compiled for a TPU that is not here, beside the equations.

Run with `pytest -m compiler` on Python 3.12 with the extra `compilers`.
"""

from dataclasses import replace

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.harness.planning.collectives import collectives
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.work import work
from jaxformer.config import ExpertOptions, FeedForwardOptions
from jaxformer.distributed import make_mesh, sharded
from tests.compilers.conftest import CONFIG, compiled_step, counts

pytestmark = pytest.mark.compiler

EXPERTS, CHOSEN, ROWS, FSDP, TENSOR = 8, 2, 8, 4, 2
LAYERS, WIDTH, HIDDEN = CONFIG.num_decoder_layers, CONFIG.d_model, CONFIG.d_ff


@pytest.fixture(scope="module")
def step(tpu_devices):
    """The program of a step with gated experts, of which each device along "tensor" has half."""
    options = ExpertOptions(EXPERTS, top_k=CHOSEN, dispatch="ragged")
    config = replace(CONFIG, feed_forward=FeedForwardOptions("silu", gated=True, experts=options))
    mesh = make_mesh(f"fsdp={FSDP},tensor={TENSOR}", tpu_devices("v5e:2x4"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    with jax.default_matmul_precision("default"):
        compiled, _ = compiled_step(sharded(mesh), ROWS, rows, config=config, documents=False)
    return compiled


def test_experts_of_a_chip_are_kernels_and_no_products_of_all_tokens_with_all_experts(step):
    # Three products with experts, each with two gradients, and attention, forward and backward.
    assert counts(step)["mosaic"] == LAYERS * (3 * 3 + 2)
    tokens = ROWS * CONFIG.max_len
    block = 4 * WIDTH**2 + TENSOR * WIDTH * EXPERTS  # attention and router
    others = 3 * 2 * tokens * (LAYERS * block + WIDTH * CONFIG.vocab_size)
    assert work(Program(step.as_text() or "")).flops * FSDP * TENSOR <= 1.1 * others


def test_a_chip_gathers_experts_in_16_bits_and_scatters_their_gradients_in_32(step):
    experts = 3 * EXPERTS * WIDTH * HIDDEN
    tables = (CONFIG.vocab_size + CONFIG.max_len) * WIDTH
    part = (LAYERS * (experts + 4 * WIDTH**2) + tables) / TENSOR  # of a device along "tensor"
    moved = collectives(Program(step.as_text() or ""))
    along_fsdp = [each for each in moved if each.devices == FSDP]
    for kind, dtype, size in (("all-gather", "bf16", 2), ("reduce-scatter", "f32", 4)):
        sent = sum(x.sent for x in along_fsdp if (x.kind, x.dtype) == (kind, dtype))
        assert 0.95 <= sent / (size * part * (1 - 1 / FSDP)) <= 1.1, kind
