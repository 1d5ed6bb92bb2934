"""The data that chips of a mesh send each other in a sharded step with gradient accumulation.

Run with `pytest -m compiler` on Python 3.12 with the extra `compilers`.
"""

from dataclasses import replace

import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.distributed import make_mesh, sharded
from jaxformer.nn.remat import REMAT
from tests.compilers.conftest import CONFIG, compiled_step
from tests.hlo import collectives, elements

pytestmark = pytest.mark.compiler

WIDE = replace(CONFIG, d_model=512, d_ff=2048, num_heads=8, num_decoder_layers=1)
MATRICES = (1024 + 512) * 512 + 4 * 512 * 512 + 2 * 512 * 2048  # tables and a block
SMALL = 2 * 2048  # more than a bias or a norm has

MESHES = [  # what reduce-scatters return: along one axis of the torus, or two after the other
    ("v5e:4x4", "data=4,fsdp=4", MATRICES // 4),
    ("v6e:4x4", "data=4,fsdp=4", MATRICES // 4),
    ("v5p:2x2x2", "data=2,fsdp=4", MATRICES // 2 + MATRICES // 4),
]


def sent(devices, axes, config=WIDE, **options):
    """The number of elements of all large arrays that the step sends, by kind, type and place."""
    strategy = sharded(make_mesh(axes, devices))
    rows = NamedSharding(strategy.mesh, PartitionSpec(("data", "fsdp")))
    program, _ = compiled_step(
        strategy, 3 * len(devices), rows, config=config, parts=3, gather_dtype="bfloat16", **options
    )
    return elements([each for each in collectives(program) if each.size > SMALL])


@pytest.mark.parametrize(("topology", "axes", "scattered"), MESHES)
def test_a_step_gathers_once_in_bfloat16_and_scatters_the_gradient_once(
    tpu_devices, topology, axes, scattered
):
    assert sent(tpu_devices(topology), axes) == {
        ("all-gather", "bf16", False): MATRICES,
        ("reduce-scatter", "f32", False): scattered,
        ("all-reduce", "f32", False): MATRICES // 4,  # over data
    }


def test_on_a_torus_a_gradient_of_any_shape_is_scattered_along_one_axis_after_the_other(
    tpu_devices,
):
    odd = replace(WIDE, vocab_size=1021, num_heads=4)
    matrices = (1021 + 512) * 512 + 4 * 512 * 512 + 2 * 512 * 2048
    assert sent(tpu_devices("v5e:4x4"), "fsdp=16", config=odd) == {
        ("all-gather", "bf16", False): matrices,
        ("reduce-scatter", "f32", False): matrices // 4 + matrices // 16,
    }


@pytest.mark.parametrize(("topology", "axes", "scattered"), MESHES)
def test_gathered_at_use_no_whole_parameter_and_no_whole_gradient_outlives_its_part(
    tpu_devices, topology, axes, scattered
):
    found = sent(tpu_devices(topology), axes, block=REMAT["blocks"], gather_at="use")
    assert found["reduce-scatter", "f32", True] == scattered
    assert found["all-reduce", "f32", False] == MATRICES // 4
    assert {key for key in found if not key[2]} == {("all-reduce", "f32", False)}
    assert {dtype for kind, dtype, _ in found if kind == "all-gather"} == {"bf16"}
