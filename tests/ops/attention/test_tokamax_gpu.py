"""tokamax's attention agrees with `reference`, by its function for all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import AttentionMask
from jaxformer.ops.attention import AttentionSpec, DeviceInfo, reference
from jaxformer.ops.attention.spec import Call
from jaxformer.ops.attention.tokamax_gpu import attend, tokamax_gpu

SEGMENTS = jnp.array([[0] * 5 + [1] * 8, [3] * 11 + [4] * 2])
REAL = jnp.arange(13)[None] < jnp.array([[13], [7]])
CALLS = {
    "causal, soft cap": (AttentionMask(causal=True), 2.0),
    "segments": (AttentionMask(causal=True, query_segments=SEGMENTS, key_segments=SEGMENTS), None),
    "window": (AttentionMask(causal=True, window=3), None),
    "padding": (AttentionMask(padding_mask=REAL), 3.0),
    "a query without keys": (AttentionMask(causal=True, offset=-2), None),
}


@pytest.mark.parametrize("mask, softcap", CALLS.values(), ids=CALLS)
def test_values_and_gradients_are_those_of_reference(mask, softcap):
    pytest.importorskip("tokamax")
    keys = jax.random.split(jax.random.key(0), 4)
    q, d_out = (jax.random.normal(key, (2, 13, 6, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 13, 3, 8)) for key in keys[2:])
    spec = AttentionSpec.create(q, k, v, mask, None, None, softcap)

    def by_tokamax(q, k, v):
        call = Call(spec, tokamax_gpu.device, q, k, v, mask, 0.3, None, None, False)
        with jax.numpy_rank_promotion("allow"):
            return attend(call, "xla")

    def expected(q, k, v):
        return reference(q, k, v, mask, scale=0.3, softcap=softcap)

    for ours, theirs in zip(
        *(
            jax.tree.leaves((f(q, k, v), jax.vjp(f, q, k, v)[1](d_out)))
            for f in (by_tokamax, expected)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_what_tokamax_lacks_is_said():
    sizes = {"heads": 2, "kv_heads": 2, "key_size": 256, "value_size": 256, "softcap": 5.0}
    spec = AttentionSpec(batch=2, queries=64, keys=64, dtype="bfloat16", **sizes)
    hopper, ampere = (DeviceInfo("gpu", "NVIDIA", at) for at in ((9, 0), (8, 0)))
    assert tokamax_gpu.unsupported_reasons(spec, hopper) == []
    assert "Hopper" in tokamax_gpu.unsupported_reasons(spec, ampere)[0]
    biased = AttentionSpec(batch=2, queries=64, keys=64, dtype="float32", bias=True, **sizes)
    assert len(tokamax_gpu.unsupported_reasons(biased, hopper)) == 2
