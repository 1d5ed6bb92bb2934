"""The kernel of a call, the calls that a kernel does not support, and the arguments of cuDNN."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.ops import attention
from jaxformer.ops.attention import (
    KERNELS,
    AttentionFn,
    AttentionSpec,
    DeviceInfo,
    auto_attention,
    choose,
    explain,
    reference,
)
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

HOPPER = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
AMPERE = DeviceInfo("gpu", "NVIDIA A100", (8, 0))
TPU = DeviceInfo("tpu", "TPU v5")
CPU = DeviceInfo("cpu", "cpu")
SPEC = AttentionSpec(
    batch=2,
    queries=256,
    keys=256,
    heads=12,
    kv_heads=6,
    key_size=64,
    value_size=64,
    dtype="bfloat16",
    causal=True,
)
CROSS = replace(SPEC, causal=False, queries=33, keys=47)


def mesh_of(kind, platform):
    """A mesh of one device that is only compiled for."""
    mesh = jax.sharding.Mesh(np.array([jax.devices()[0]]), "data").abstract_mesh
    return mesh.update(abstract_device=jax.sharding.AbstractDevice(kind, 1, platform))


MESH_OF_TPUS = mesh_of("TPU v5", "tpu")
V100 = DeviceInfo("gpu", "NVIDIA V100", (7, 0))

# A call, a device, and the end of the only reason why the function does not compute it.
UNSUPPORTED = {
    "cudnn": [
        (SPEC, CPU, "needs an NVIDIA GPU of the Ampere generation or later, not cpu"),
        (SPEC, DeviceInfo("gpu", "AMD MI300"), "not gpu (AMD MI300)"),
        (SPEC, V100, "not gpu (NVIDIA V100)"),
        (replace(SPEC, dtype="float32"), HOPPER, "bfloat16 and float16, not float32"),
        (replace(SPEC, key_size=12, value_size=12), HOPPER, "at most 256 on this device, not 12"),
        (
            replace(SPEC, key_size=136, value_size=136),
            AMPERE,
            "at most 128 on this device, not 136",
        ),
        (
            replace(SPEC, key_size=264, value_size=264),
            HOPPER,
            "at most 256 on this device, not 264",
        ),
        (replace(SPEC, value_size=32), HOPPER, "as large as keys, not 64 and 32"),
        (replace(SPEC, dropout=0.1), HOPPER, "does not support dropout on attention weights"),
        (replace(SPEC, softcap=50.0), HOPPER, "does not support a soft cap on the logits"),
        (replace(SPEC, segments=True), AMPERE, "Hopper GPUs and later, with a JAX that has them"),
        (replace(SPEC, segments=True, window=9), HOPPER, "with a window, a bias or padding_mask"),
        (replace(CROSS, segments=True), HOPPER, "supports segments only for T = S of 128 or more"),
        (replace(SPEC, explicit=True), HOPPER, "such as a prefix LM's"),
        (replace(SPEC, offset=3), HOPPER, "supports causal masks only for T = S and offset=0"),
        (replace(SPEC, keys=512), HOPPER, "supports causal masks only for T = S and offset=0"),
        (replace(SPEC, padding_mask=True), HOPPER, "which no earlier query sees)"),
        (replace(CROSS, bias=True), HOPPER, "only for even lengths (pad them)"),
        (
            replace(CROSS, queries=34, keys=48, bias=True, padding_mask=True),
            HOPPER,
            "the bias does not",
        ),
        (replace(CROSS, queries=15), HOPPER, "fewer than 16 queries to reference"),
    ],
    "gpu_flash": [
        (SPEC, V100, "not gpu (NVIDIA V100)"),
        (replace(SPEC, bias=True), HOPPER, "does not support a bias on the logits"),
        (replace(SPEC, softcap=50.0), HOPPER, "does not support a soft cap on the logits"),
        (replace(SPEC, value_size=160), HOPPER, "at most 128, not 64 and 160"),
        (replace(SPEC, dtype="float64"), HOPPER, "float32, not float64"),
        (replace(SPEC, queries=15), HOPPER, "fewer than 16 queries to reference"),
    ],
    "tpu_flash": [
        (SPEC, HOPPER, "needs a TPU, not gpu (NVIDIA H100)"),
        (replace(SPEC, bias=True), TPU, "does not support a bias on the logits"),
        (replace(SPEC, explicit=True), TPU, "such as a prefix LM's"),
        (replace(SPEC, offset=None), TPU, "an offset known only at run time"),
        (replace(SPEC, dtype="float16"), TPU, "float32 and bfloat16, not float16"),
        (replace(SPEC, keys=200), TPU, "needs lengths from 512 on, or multiples of 128, not 200"),
        (
            replace(SPEC, key_size=2**15, dtype="float32"),
            TPU,
            "needs more memory on the chip for heads of 32768",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "spec", "device", "words"),
    [(name, *case) for name, cases in UNSUPPORTED.items() for case in cases],
)
def test_a_function_says_what_it_does_not_support(name, spec, device, words):
    reason = attention.ATTENTION_FNS[name].why_not(spec, device)
    assert reason.endswith(words) and "; it" not in reason
    assert choose(spec, device).name != name


def test_all_reasons_are_given_with_the_call_and_a_cure():
    q = jnp.zeros((1, 16, 1, 8))
    dropout = DropoutMask(DropoutRng(jax.random.key(0), jnp.arange(1)), "weights", 0.1)
    with pytest.raises(ConfigError) as refused:
        attention.cudnn(q, q, q, AttentionMask(), scale=1.0, dropout=dropout, interpret=True)
    assert str(refused.value) == (
        "the cudnn attention function does not support dropout on attention weights; it supports "
        "bfloat16 and float16, not float32: use 'reference' or 'blockwise' (the call is B=1 T=16 "
        "S=16 N=1 K=1 H=8 Hv=8 float32 dropout=0.1)"
    )


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_named_attention_function_is_not_replaced_by_another(name):
    q = jnp.zeros((1, 128, 1, 8), jnp.bfloat16)
    with pytest.raises(ConfigError, match=f"{name} .* cpu"):
        attention.ATTENTION_FNS[name](q, q, q, AttentionMask(), scale=1.0)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_explicit_mask_is_computed_by_another_function_only_for_a_cache(name, assert_equal):
    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 128, 1, 8)), jnp.float32)
    prefix = np.tril(np.ones((2, 128, 128), bool), 5)
    with pytest.raises(ConfigError, match=name):
        attention.ATTENTION_FNS[name](q, q, q, AttentionMask(explicit=prefix), scale=1.0)
    beams = AttentionMask(explicit=prefix, offset=jnp.int32(0))
    expected = reference(q, q, q, beams, scale=1.0)
    assert_equal(attention.ATTENTION_FNS[name](q, q, q, beams, scale=1.0), expected)


CUDNN_MASKS = {
    "all": AttentionMask(),
    "causal": AttentionMask(causal=True),
    "window": AttentionMask(causal=True, window=3),
    "padding": AttentionMask(
        padding_mask=np.array([[1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [0] * 7]) > 0
    ),
}


@pytest.mark.parametrize("mask", CUDNN_MASKS.values(), ids=CUDNN_MASKS)
def test_the_arguments_of_cudnn_mean_the_mask(mask, rng, assert_equal, monkeypatch):
    """The very arguments, given to JAX's other implementation of the same function."""
    module = import_module("jaxformer.ops.attention.cudnn")
    monkeypatch.setattr(module, "_IMPLEMENTATION", "xla")
    q, k, v = (jnp.asarray(rng.standard_normal((3, 7, n, 5)), jnp.float32) for n in (4, 2, 2))

    def by_jax(q, k, v):
        return module.attend(q, k, v, mask, scale=0.6, bias=None)

    def plain(q, k, v):
        return reference(q, k, v, mask, scale=0.6)

    def gradients(f):
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)

    for given, expected in zip(*map(jax.tree.leaves, map(gradients, (by_jax, plain))), strict=True):
        assert_equal(given, expected)


@pytest.mark.parametrize(
    ("spec", "device", "name"),
    [
        (SPEC, HOPPER, "cudnn"),
        (replace(CROSS, padding_mask=True), AMPERE, "cudnn"),
        (replace(SPEC, key_size=256, value_size=256), HOPPER, "cudnn"),
        (SPEC, TPU, "tpu_flash"),
        (replace(SPEC, segments=True, padding_mask=True, value_size=32), TPU, "tpu_flash"),
        (SPEC, CPU, "reference"),
        (replace(SPEC, queries=1023, keys=1024), CPU, "reference"),
        (replace(SPEC, queries=1024, keys=1024), CPU, "blockwise"),
        (replace(SPEC, queries=1024, keys=1024, offset=None), CPU, "reference"),
        (replace(SPEC, queries=1024, keys=1024, causal=False), CPU, "reference"),
        (replace(SPEC, queries=2048, keys=2048), CPU, "blockwise"),
        (replace(SPEC, queries=1, keys=4096), CPU, "reference"),
        (replace(SPEC, segments=True), HOPPER, "cudnn"),
        (replace(SPEC, segments=True), AMPERE, "gpu_flash"),
        (replace(SPEC, dropout=0.1, padding_mask=True, dtype="float32"), AMPERE, "gpu_flash"),
        (replace(SPEC, offset=None, keys=2048, value_size=32), HOPPER, "gpu_flash"),
        (replace(SPEC, offset=None, explicit=True, queries=4), HOPPER, "reference"),
        (replace(SPEC, segments=True, bias=True, queries=2048, keys=2048), HOPPER, "reference"),
        (replace(SPEC, segments=True, bias=True, queries=8192, keys=8192), HOPPER, "blockwise"),
        (replace(SPEC, bias=True, queries=8192, keys=8192), TPU, "blockwise"),
    ],
)
def test_a_function_made_for_the_device_comes_before_the_general_ones(spec, device, name):
    assert choose(spec, device).name == name
    first, *reasons = explain(spec, device).splitlines()
    assert first.endswith(f": {name}")
    before = [kernel.name for kernel in KERNELS[: len(reasons)]]
    assert [line.split()[1] for line in reasons] == [f"{each}:" for each in before]
    assert KERNELS[len(reasons)].name == name


def test_a_kernel_that_failed_is_passed_over():
    passed = choose(SPEC, TPU, lambda kernel: kernel.name != "tpu_flash")
    assert passed.name == "reference"
    said = explain(SPEC, TPU, lambda kernel: kernel.name != "tpu_flash")
    assert "not tpu_flash: it failed on this device" in said


def test_the_guide_shows_an_explanation():
    spec = replace(SPEC, batch=8, queries=1024, keys=1024, kv_heads=12, segments=True)
    readme = Path(__file__).parents[3] / "experiments" / "guides" / "devices.md"
    shown = explain(spec, DeviceInfo("gpu", "NVIDIA H200", (9, 0)))
    assert f"```text\n{shown}\n```" in readme.read_text(encoding="utf-8")


def test_auto_computes_what_reference_does(rng, assert_equal):
    q, k = (jnp.asarray(rng.standard_normal((2, 7, n, 4)), jnp.float32) for n in (6, 2))
    dropout = DropoutMask(DropoutRng(jax.random.key(5), np.arange(2)), "weights", 0.5)
    settings = {"scale": 0.5, "dropout": dropout, "softcap": 0.7}

    @jax.jit
    def both(*qkv):
        return [
            f(*qkv, AttentionMask(causal=True), **settings) for f in (auto_attention, reference)
        ]

    assert_equal(*both(q, k, k))


def loops(q, mask):
    """Whether `auto_attention` visits blocks of the keys of `q` one after the other."""
    made = jax.make_jaxpr(lambda q: auto_attention(q, q, q, mask, scale=0.5))(q)
    return "scan" in str(made) or "while" in str(made)


def test_auto_takes_the_kernel_that_is_chosen():
    short, long = (jax.ShapeDtypeStruct((2, size, 2, 4), jnp.float32) for size in (512, 1024))
    causal = AttentionMask(causal=True)
    assert [loops(q, causal) for q in (short, long)] == [False, True]


@pytest.mark.long
def test_flash_attention_is_lowered_for_a_tpu_forward_and_backward():
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    segments = np.arange(256).reshape(1, -1).repeat(2, axis=0) // 100
    mask = AttentionMask(causal=True, query_segments=segments, key_segments=segments)

    def total(q, k, v):
        return auto_attention(q, k, v, mask, scale=0.1).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(MESH_OF_TPUS):
        traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2  # forward, the three gradients


def test_the_devices_of_the_mesh_that_is_set_decide_also_while_tracing():
    assert DeviceInfo.current() == CPU
    with jax.set_mesh(jax.sharding.Mesh(np.array([jax.devices()[0]]), "data")):
        assert DeviceInfo.current() == CPU
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)

    def attend(x):
        return auto_attention(x, x, x, AttentionMask(causal=True), scale=0.1)

    with jax.sharding.use_abstract_mesh(MESH_OF_TPUS):
        assert DeviceInfo.current() == TPU
        assert "pallas_call" in str(jax.make_jaxpr(attend)(x))
    assert "pallas_call" not in str(jax.make_jaxpr(attend)(x))


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA B300 SXM6 AC", (10, 3)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0)),
        ("NVIDIA H1000", None),
        ("AMD H100", None),
    ],
)
def test_the_capability_of_a_gpu_that_is_only_compiled_for_is_known_by_its_name(kind, capability):
    with jax.sharding.use_abstract_mesh(mesh_of(kind, "gpu")):
        assert DeviceInfo.current() == DeviceInfo("gpu", kind, capability)


def test_without_a_mesh_the_default_device_decides(monkeypatch):
    other = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [other])
    monkeypatch.setattr(jax, "devices", lambda: [*jax.local_devices()])
    assert DeviceInfo.current() == HOPPER


@pytest.mark.parametrize("chosen", ["cpu", None])
def test_the_default_device_may_be_given_by_its_platform_or_as_a_device(chosen):
    with jax.default_device(chosen or jax.devices()[-1]):
        assert DeviceInfo.current() == CPU


def test_a_function_is_told_from_other_values_by_the_type_of_attention_functions():
    assert isinstance(auto_attention, AttentionFn) and isinstance(lambda *_: None, AttentionFn)
    assert not isinstance("reference", AttentionFn)
