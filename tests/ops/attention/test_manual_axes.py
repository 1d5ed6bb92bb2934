"""Kernels of attention within a program's own `jax.shard_map`; traced, not run."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxformer import AttentionMask
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import cudnn, gpu_flash, tpu_flash
from jaxformer.ops.lookup import lookup

KERNELS = (tpu_flash, gpu_flash, cudnn)


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    monkeypatch.setattr(import_module("jaxformer.ops.attention.cudnn"), "_IMPLEMENTATION", "xla")


def mapped(function, check_vma, sizes, axis_names=()):
    """The types of `function` of rows that "data" divides, mapped over `axis_names` or all axes."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            function,
            in_specs=(P("data"), P("data")),
            out_specs=P("data"),
            axis_names=set(axis_names or sizes),
            check_vma=check_vma,
        )
        rows = jnp.zeros((6, 128, 4, 16), jnp.bfloat16), jnp.zeros((6, 128), jnp.int32)
        return jax.eval_shape(mapped, *rows)


def gradient(kernel, has_documents, q, segments):
    documents = {"query_segments": segments, "key_segments": segments} if has_documents else {}
    mask = AttentionMask(causal=True, **documents)

    def total(q):
        out = kernel.compute(q, q, q, mask, scale=0.1, bias=None, dropout=None, softcap=None)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(total)(q)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_differentiated_in_a_map_over_all_axes(kernel, has_documents, check_vma):
    if kernel is cudnn and has_documents:
        pytest.skip("needs cuDNN: tests/compilers/test_cuda.py")
    function = partial(gradient, kernel, has_documents)
    found = mapped(function, check_vma, {"data": 3, "tensor": 2})
    assert found.shape == (6, 128, 4, 16)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_checked_map_that_leaves_axes_to_xla_is_refused(kernel):
    function = partial(gradient, kernel, False)
    sizes = {"data": 3, "tensor": 2}
    assert mapped(function, False, sizes, ["data"]).shape == (6, 128, 4, 16)
    with pytest.raises(ConfigError, match="check_vma=True"):
        mapped(function, True, sizes, ["data"])


def test_so_is_a_lookup_in_a_table_that_is_divided_there():
    def rows_of(x, ids):
        return lookup(jnp.ones((8, 5)), ids, jnp.float32)

    sizes = {"data": 3, "sequence": 1, "tensor": 2}
    assert mapped(rows_of, False, sizes, ["data"]).shape == (6, 128, 5)
    with pytest.raises(ConfigError, match="check_vma=True"):
        mapped(rows_of, True, sizes, ["data"])
