"""Kernels of attention on meshes: each device computes its own rows and its own heads."""

import json

import pytest

from jaxformer.ops.attention import AttentionSpec
from jaxformer.ops.attention.kernel import part_of_device
from tests.ops.test_partitioning import on_mesh
from tests.two_processes import finished, start


@pytest.mark.long
def test_rows_along_data_and_heads_along_tensor_are_computed_where_they_are():
    (ended,) = finished(start("-m", "tests.ops.attention.rows_on_mesh", devices=4))
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert [each["kernel"] for each in found] == ["gpu_flash", "tpu_flash", "tpu_decode"]
    for each in found:
        assert each["difference"] < 1e-5 and each["sent"] == 0, each


@pytest.mark.parametrize(
    ("batch", "heads", "part"),
    [(6, (6, 2), (3, 3, 1)), (3, (6, 2), (3, 3, 1)), (6, (6, 3), (3, 6, 3))],
)
def test_a_device_has_the_rows_and_the_heads_that_its_axes_divide(batch, heads, part):
    sizes = {"queries": 7, "keys": 7, "key_size": 5, "value_size": 5, "dtype": "float32"}
    spec = AttentionSpec(batch=batch, heads=heads[0], kv_heads=heads[1], **sizes)
    with on_mesh(data=2, fsdp=1, sequence=1, tensor=2):
        found = part_of_device(spec)
    assert (found.batch, found.heads, found.kv_heads) == part
