"""Which kernel a call gets, what the others refuse, and what cuDNN is told."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import kernels
from jaxformer.config import ConfigError
from jaxformer.dropout import Dropout, Noise
from jaxformer.kernels import Auto, Call, Machine, choose, explain, reference
from jaxformer.kernels.cudnn import cudnn_refusals, tell_cudnn, zeros_without_keys
from jaxformer.kernels.pallas import pallas_refusals
from jaxformer.masks import Mask

HOPPER = Machine("gpu", "NVIDIA H100", (9, 0))
AMPERE = Machine("gpu", "NVIDIA A100", (8, 0))
TPU = Machine("tpu", "TPU v5")
CPU = Machine("cpu", "cpu")
CALL = Call(
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
CROSS = replace(CALL, causal=False, queries=33, keys=47)

REFUSED_BY_CUDNN = {
    "platform": (CALL, CPU, "needs an NVIDIA GPU of Ampere's generation or later, not cpu: use"),
    "AMD": (CALL, Machine("gpu", "AMD MI300"), r"not gpu \(AMD MI300\): use the blockwise"),
    "Volta": (CALL, Machine("gpu", "NVIDIA V100", (7, 0)), r"not gpu \(NVIDIA V100\): use"),
    "float32": (replace(CALL, dtype="float32"), HOPPER, "but float32 was given: set dtype='bfloat"),
    "head of 12": (replace(CALL, key_size=12, value_size=12), HOPPER, "but head_dim=12 was given"),
    "head of 136": (replace(CALL, key_size=136, value_size=136), AMPERE, "at most 128 on this"),
    "head of 264": (replace(CALL, key_size=264, value_size=264), HOPPER, "at most 256 on this"),
    "values": (replace(CALL, value_size=32), HOPPER, "head_dim=64 and value_head_dim=32: use the"),
    "dropout": (replace(CALL, dropout=0.1), HOPPER, "but rate=0.1 was given: use the reference"),
    "segments": (replace(CALL, segments=True), HOPPER, "packed texts would see each other: use"),
    "pairs": (replace(CALL, pairs=True), HOPPER, "not told which pairs of tokens see each other"),
    "window": (replace(CROSS, window=3), HOPPER, "but window=3 was given without causal=True"),
    "offset": (replace(CALL, offset=3), HOPPER, "T=256, S=256 and offset 3 were given: use the"),
    "cache": (replace(CALL, offset=None), HOPPER, "offset one known only at run time were given"),
    "lengths": (replace(CALL, keys=512), HOPPER, "T=256, S=512 and offset 0 were given: use the"),
    "padding": (replace(CALL, key_valid=True), HOPPER, "leave out key_valid where all padding is"),
    "odd bias": (replace(CROSS, bias=True), HOPPER, "but T=33 and S=47 were given: pad them"),
    "bias": (replace(CROSS, queries=34, keys=48, bias=True, key_valid=True), HOPPER, "not follow"),
}

REFUSED_BY_PALLAS = {
    "platform": (CALL, HOPPER, r"is written for TPUs, not for gpu \(NVIDIA H100\): use the"),
    "bias": (replace(CALL, bias=True), TPU, "has no bias on the logits: use the blockwise"),
    "dropout": (replace(CALL, dropout=0.1), TPU, "but rate=0.1 was given: use the reference"),
    "window": (replace(CALL, causal=False, window=3), TPU, "window=3 was given without causal"),
    "pairs": (replace(CALL, pairs=True), TPU, "not told which pairs of tokens see each other"),
    "cache": (replace(CALL, offset=None), TPU, "give a number, or use the blockwise"),
    "lengths": (replace(CALL, keys=200), TPU, "T=256 and S=200 were given: pad them, or use"),
    "float16": (replace(CALL, dtype="float16"), TPU, "but float16 was given: use the blockwise"),
}


def only(refusals: list[str]) -> str:
    assert len(refusals) == 1
    return refusals[0]


@pytest.mark.parametrize(
    ("call", "machine", "words"), REFUSED_BY_CUDNN.values(), ids=REFUSED_BY_CUDNN
)
def test_cudnn_says_what_it_cannot_do_and_what_can(call, machine, words, assert_says):
    assert_says(only(cudnn_refusals(call, machine)), words)
    assert choose(call, machine).kernel in ("reference", "blockwise")


@pytest.mark.parametrize(
    ("call", "machine", "words"), REFUSED_BY_PALLAS.values(), ids=REFUSED_BY_PALLAS
)
def test_splash_attention_says_what_it_cannot_do_and_what_can(call, machine, words, assert_says):
    assert_says(only(pallas_refusals(call, machine)), words)
    assert choose(call, machine).kernel != "pallas"


@pytest.fixture
def assert_says():
    def check(sentence, words):
        with pytest.raises(ConfigError, match=f"the flash kernel .*{words}"):
            kernels.call.refuse("flash", [sentence])

    return check


def test_several_refusals_are_all_told():
    call = replace(CALL, dtype="float32", dropout=0.1)
    with pytest.raises(ConfigError, match="the cudnn kernel has no dropout .*; it computes in bf"):
        kernels.call.refuse("cudnn", cudnn_refusals(call, HOPPER))


@pytest.mark.parametrize("name", ["cudnn", "pallas"])
def test_a_named_kernel_is_not_exchanged_for_another(name):
    q = jnp.zeros((1, 128, 1, 8), jnp.bfloat16)
    with pytest.raises(
        ConfigError, match=f"the {name} kernel .* not (for )?cpu: use the blockwise"
    ):
        kernels.get(name)(q, q, q, Mask(), scale=1.0)


CUDNN_MASKS = {
    "all": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=3),
    "padding": Mask(
        key_valid=np.array([[1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [0] * 7]) > 0
    ),
}


@pytest.mark.parametrize("mask", CUDNN_MASKS.values(), ids=CUDNN_MASKS)
def test_what_cudnn_is_told_means_the_mask(mask, rng, assert_equal):
    """The very arguments, given to JAX's other implementation of the same function."""
    q, k, v = (jnp.asarray(rng.standard_normal((3, 7, n, 5)), jnp.float32) for n in (4, 2, 2))

    def told(q, k, v):
        told = tell_cudnn(k, v, mask)
        out = jax.nn.dot_product_attention(
            q,
            told.k,
            told.v,
            scale=0.6,
            is_causal=told.is_causal,
            key_value_seq_lengths=told.lengths,
            local_window_size=told.window,
            implementation="xla",
        )
        return out if mask.key_valid is None else zeros_without_keys(out, mask.key_valid)

    def plain(q, k, v):
        return reference(q, k, v, mask, scale=0.6)

    def slopes(f):
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)

    for given, expected in zip(*map(jax.tree.leaves, map(slopes, (told, plain))), strict=True):
        assert_equal(given, expected)


@pytest.mark.parametrize(
    ("call", "machine", "kernel"),
    [
        (CALL, HOPPER, "cudnn"),
        (replace(CROSS, key_valid=True), AMPERE, "cudnn"),
        (replace(CALL, key_size=256, value_size=256), HOPPER, "cudnn"),
        (CALL, TPU, "pallas"),
        (replace(CALL, segments=True, key_valid=True, value_size=32), TPU, "pallas"),
        (CALL, CPU, "reference"),
        (replace(CALL, queries=1024, keys=1024), CPU, "reference"),
        (replace(CALL, queries=2048, keys=2048), CPU, "blockwise"),
        (replace(CALL, queries=1, keys=4096), CPU, "reference"),
        (replace(CALL, segments=True, queries=2048, keys=2048), HOPPER, "reference"),
        (replace(CALL, segments=True, queries=8192, keys=8192), HOPPER, "blockwise"),
        (replace(CALL, bias=True, queries=8192, keys=8192), TPU, "blockwise"),
    ],
)
def test_the_kernel_written_for_the_device_goes_before_those_for_all(call, machine, kernel):
    choice = choose(call, machine)
    assert choice.kernel == kernel
    assert {choice.kernel, *choice.others} == set(kernels.KERNELS)


def test_the_explanation_names_every_kernel_once():
    lines = explain(replace(CALL, window=5, offset=None, dropout=0.1), HOPPER).splitlines()
    assert lines[0] == (
        "attention B=2 T=256 S=256 N=12 K=6 H=64 Hv=64 bfloat16 causal window=5 offset=traced "
        "dropout=0.1 on gpu (NVIDIA H100)"
    )
    assert lines[1].startswith("  taken: reference, B times N times T times S is 1,572,864, below")
    named = [line.split(":")[0] for line in lines[2:]]
    assert named == ["  not xla", "  not blockwise", "  not cudnn", "  not pallas"]
    assert "it has no dropout on attention weights" in explain(replace(CALL, dropout=0.1), HOPPER)


def test_the_readme_shows_what_explain_says():
    call = replace(CALL, batch=8, queries=1024, keys=1024, kv_heads=12, segments=True)
    readme = Path(__file__).parents[1] / "experiments" / "README.md"
    shown = explain(call, Machine("gpu", "NVIDIA H200", (9, 0)))
    assert f"```text\n{shown}\n```" in readme.read_text(encoding="utf-8")


def test_the_choice_made_by_itself_is_that_of_this_machine(rng, assert_equal):
    told = []
    auto = Auto(told.append)
    q, k = (jnp.asarray(rng.standard_normal((2, 7, n, 4)), jnp.float32) for n in (6, 2))
    dropout = Dropout(Noise.of(jax.random.key(5), np.arange(2)), "weights", 0.5)
    settings = {"scale": 0.5, "dropout": dropout}
    attend = jax.jit(lambda *x: auto(*x, Mask(causal=True), **settings))
    assert_equal(attend(q, k, k), reference(q, k, k, Mask(causal=True), **settings))
    (call,) = auto.taken
    assert (call.queries, call.heads, call.kv_heads, call.dropout) == (7, 6, 2, 0.5)
    assert str(told[0]) == explain(call)

    long = jax.ShapeDtypeStruct((2, 4096, 2, 4), jnp.float32)
    for _ in range(2):
        jax.eval_shape(lambda x: auto(x, x, x, Mask(), scale=0.5), long)
    jax.eval_shape(lambda x: auto(x, x, x, Mask(causal=True), scale=0.5), long)
    assert [choice.kernel for choice in told] == ["reference", "blockwise"]
    assert [choice.kernel for choice in auto.taken.values()] == ["reference", *["blockwise"] * 2]


@pytest.mark.slow
def test_splash_attention_is_lowered_for_a_tpu_forward_and_backward(monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: TPU)
    auto = Auto()
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    segments = np.arange(256).reshape(1, -1).repeat(2, axis=0) // 100
    mask = Mask(causal=True, query_segments=segments, key_segments=segments)

    def total(q, k, v):
        return auto(q, k, v, mask, scale=0.1).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert (
        text.count("tpu_custom_call") == 3
    )  # forward, the queries' slope, that of keys and values
    assert [choice.kernel for choice in auto.taken.values()] == ["pallas"]
