"""An attention function is compared with `reference` before it is used on a device."""

import time

import jax
import jax.numpy as jnp
import pytest

from jaxformer.ops.attention import AttentionSpec, blockwise, reference
from jaxformer.ops.attention.first_contact import compare, small_call
from jaxformer.ops.attention.selection import select
from jaxformer.ops.attention.spec import DeviceInfo

CALL = AttentionSpec(
    batch=64, queries=37, keys=37, heads=12, kv_heads=6, key_size=8, value_size=8, dtype="float32"
)
KINDS = {
    "causal window": {"causal": True, "window": 19},
    "segments": {"segments": True, "causal": True},
    "padding and dropout": {"padding_mask": True, "dropout": 0.2},
    "soft cap and bias": {"softcap": 3.0, "bias": True},
    "explicit, cached": {"explicit": True, "offset": None, "keys": 53},
    "bfloat16": {"dtype": "bfloat16", "causal": True},
}


def spec(**kinds):
    return AttentionSpec(**{**vars(CALL), **kinds})


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_function_agrees_on_a_call_of_its_kinds(kind):
    verdict = compare("blockwise", blockwise, spec(**KINDS[kind]))
    assert verdict.failure == "" and verdict.call.heads == 4 and verdict.call.batch == 2
    assert {x: getattr(verdict.call, x) for x in KINDS[kind] if x not in ("window", "keys")} == {
        x: value for x, value in KINDS[kind].items() if x not in ("window", "keys")
    }


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
    verdict = compare(
        "broken", function, spec(causal=True), limit=0.5 if function is slow else 60.0
    )
    assert verdict.failure.startswith(said) and said in str(verdict)


def test_it_is_compared_while_another_program_is_traced():
    verdicts = []

    @jax.jit
    def program(x):
        verdicts.append(compare("blockwise", blockwise, spec()))
        return x

    program(jnp.ones(3))
    assert verdicts[0].failure == ""


def test_a_small_call_is_small_and_keeps_the_heads_of_a_group():
    call = small_call(spec(queries=4096, keys=4096, heads=32, kv_heads=8, causal=True, window=1024))
    assert (call.queries, call.keys, call.heads, call.kv_heads) == (512, 512, 8, 2)
    assert call.window == 170


def test_a_function_that_failed_is_passed_over():
    tpu = DeviceInfo("tpu", "TPU v5 lite")
    sizes = {"queries": 512, "keys": 512, "heads": 6, "key_size": 64, "value_size": 64}
    call = spec(**sizes, dtype="bfloat16", causal=True)
    first = select(call, tpu)
    second = select(call, tpu, [first.name])
    assert (first.name, second.name) == ("tpu_flash", "tpu_splash")
    assert "not tpu_flash: it failed on this device" in str(second)
