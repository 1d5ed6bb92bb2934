"""Attention functions and products are compared on a device; the result is said and recorded."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from experiments.harness.training import device_check
from experiments.harness.training.attention_inputs import inputs_of, mask_of, small_call
from experiments.harness.training.device_check import (
    PRODUCTS,
    accept,
    check_products,
    compare,
    compare_products,
)
from jaxformer.ops.attention import ATTENTION_FNS, AttentionSpec, blockwise, reference, tpu_decode
from jaxformer.ops.attention.kernel import DeviceInfo

CALL = AttentionSpec(
    batch=64, queries=37, keys=37, heads=12, kv_heads=6, key_size=8, value_size=8, dtype="float32"
)
KINDS = {
    "segments in a window": {"segments": True, "causal": True, "window": 19},
    "padding and dropout": {"padding_mask": True, "dropout": 0.2},
    "bfloat16, soft cap and bias": {"dtype": "bfloat16", "softcap": 3.0, "bias": True},
    "explicit, cached": {"explicit": True, "offset": None, "keys": 53},
}


def spec(**kinds):
    return AttentionSpec(**{**vars(CALL), **kinds})


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_function_agrees_on_a_call_of_its_kinds(kind):
    result = compare("blockwise", blockwise, spec(**KINDS[kind]))
    assert result.failure == "" and result.call.heads == 4 and result.call.batch == 2
    assert {x: getattr(result.call, x) for x in KINDS[kind] if x not in ("window", "keys")} == {
        x: value for x, value in KINDS[kind].items() if x not in ("window", "keys")
    }


def test_a_kernel_for_a_cache_is_compared_on_a_call_with_a_cache(rng):
    call = small_call(spec(queries=1, keys=301, causal=True, offset=None, from_cache=True))
    made = AttentionSpec.create(*inputs_of(call), mask_of(call, rng))
    assert (made.queries, made.keys) == (1, 301)
    assert tpu_decode.why_not(made, DeviceInfo("tpu", "TPU v5 lite")) == ""
    compute = partial(tpu_decode, interpret=True)
    assert compare("tpu_decode", compute, call).failure == ""


def scaled(q, k, v, mask, **options):
    return 1.001 * reference(q, k, v, mask, **options)


def without_gradient(q, k, v, mask, **options):
    return reference(q, jax.lax.stop_gradient(k), v, mask, **options)


def infinite(q, k, v, mask, **options):
    return reference(q, k, v, mask, **options) + jnp.inf


def raising(q, k, v, mask, **options):
    raise NotImplementedError("no room for\n this shape")


def slow(q, k, v, mask, **options):
    time.sleep(1.0)
    return reference(q, k, v, mask, **options)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (scaled, "values differ by 1.0e-03 of the largest"),
        (without_gradient, "dk differ by 1.0e+00"),
        (infinite, "values differ by"),
        (raising, "raised NotImplementedError: no room for this shape"),
        (slow, "took more than 0.5 s"),
    ],
)
def test_a_wrong_function_fails_with_its_reason(function, said):
    result = compare("broken", function, spec(causal=True), limit=0.5 if function is slow else 60.0)
    assert result.failure.startswith(said) and said in str(result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_each_type_round_as_it_does(dtype):
    result = compare_products(dtype)
    assert result.failure == ""
    assert str(result).startswith(f"products in {dtype} on a small call: agrees with the reference")


def summed_in_bfloat16(x, matrix):
    def add(total, part):
        return total + jnp.matmul(*part), None

    start = jnp.zeros((x.shape[0], matrix.shape[1]), jnp.bfloat16)
    parts = x.reshape(len(x), -1, 4).swapaxes(0, 1), matrix.reshape(-1, 4, matrix.shape[1])
    return jax.lax.scan(add, start, parts)[0]


def of_less_precision(x, matrix):
    return jnp.matmul(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)).astype(x.dtype)


@jax.custom_vjp
def with_a_wrong_gradient(x, matrix):
    return x @ matrix


with_a_wrong_gradient.defvjp(
    lambda x, matrix: (x @ matrix, (x, matrix)),
    lambda saved, d_out: (d_out @ saved[1].T, 0.99 * saved[0].T @ d_out),
)


@pytest.mark.parametrize(
    ("product", "dtype", "said"),
    [
        (summed_in_bfloat16, "bfloat16", "mine: values differ by"),
        (of_less_precision, "float32", "mine: values differ by"),
        (with_a_wrong_gradient, "float32", "mine: dmatrix differ by 1.0e-02 of the largest"),
        (partial(jnp.matmul, precision="none"), "float32", "raised ValueError"),
    ],
)
def test_a_product_of_less_precision_or_with_a_wrong_gradient_is_named(product, dtype, said):
    products = {"logits_matmul": PRODUCTS["logits_matmul"], "mine": product}
    assert compare_products(dtype, products).failure.startswith(said)


def test_it_is_compared_while_another_program_is_traced():
    results = []

    @jax.jit
    def program(x):
        results.append(compare("blockwise", blockwise, spec()))
        return x

    program(jnp.ones(3))
    assert results[0].failure == ""


def test_a_small_call_is_small_and_keeps_the_heads_of_a_group():
    call = small_call(spec(queries=4096, keys=4096, heads=32, kv_heads=8, causal=True, window=1024))
    assert (call.queries, call.keys, call.heads, call.kv_heads) == (512, 512, 8, 2)
    assert call.window == 170


@pytest.fixture
def fresh():
    """A process that has compared nothing, before and after."""
    forget_comparisons()
    yield
    forget_comparisons()


def forget_comparisons():
    device_check._compare_kernel.cache_clear()
    device_check._compare_products.cache_clear()


def test_a_product_that_differs_is_said_with_advice(fresh, capsys, monkeypatch):
    checks = []
    assert check_products("float32", checks) and capsys.readouterr().out == ""
    wrong = partial(compare_products, products={"mine": with_a_wrong_gradient})
    monkeypatch.setattr(device_check, "compare_products", wrong)
    forget_comparisons()
    assert not check_products("float32", checks) and checks[-1].failure
    said = capsys.readouterr().out
    assert said.startswith("products in float32 on a small call: mine: dmatrix differ by 1.0e-02")
    assert "nothing replaces a product: update the driver, unset XLA_FLAGS, or give" in said


def test_what_raises_here_is_said_not_accepted_and_compared_once_for_all_runs(
    fresh, capsys, monkeypatch
):
    call, kernel = spec(queries=257, keys=257, causal=True), ATTENTION_FNS["tpu_flash"]
    checks, later = [], []
    assert not accept(call, kernel, checks)
    said = capsys.readouterr().out
    assert "tpu_flash on a small call: raised ConfigError" in said
    assert said.endswith("the next attention function is taken\n")
    assert not (accept(call, kernel, later) or accept(call, kernel, later))
    assert later == checks and len(checks) == 1, "another run has its own list"
    monkeypatch.setattr(DeviceInfo, "current", lambda: DeviceInfo("tpu", "TPU v5e"))
    assert accept(call, kernel, []), "nothing is computed for devices that are not here"
