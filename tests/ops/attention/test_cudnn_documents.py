"""The arguments with which cuDNN gets packed documents, and the calls that it does not get."""

import inspect
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import AttentionSpec, DeviceInfo, cudnn, reference
from jaxformer.ops.masks import AttentionMask

module = import_module("jaxformer.ops.attention.cudnn")
HOPPER = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
LENGTH = 192  # room for three documents


def packed(calls, q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """JAX's function as its docstring describes it, by `reference`."""
    assert q_seqlen is kv_seqlen and q_offsets is kv_offsets
    assert q_seqlen.shape == (2, 3) and q_offsets.shape == (2, 4)
    place = jnp.arange(LENGTH)[None, :, None]
    start, stop = q_offsets[:, None, :-1], (q_offsets[:, :-1] + q_seqlen)[:, None]
    inside = (place >= start) & (place < stop) & (start >= 0)
    document = jnp.where(inside.any(-1), jnp.argmax(inside, -1), -1)
    jax.debug.callback(lambda: calls.append(1))
    mask = AttentionMask(
        causal=mask_type == "PADDING_CAUSAL", query_segments=document, key_segments=document
    )
    return reference(q, k, v, mask, scale=scale)


def runs(*lengths, ids=None):
    return np.repeat(ids or np.arange(1, len(lengths) + 1), lengths).astype(np.int32)


ROWS = {
    "one and two documents": ([runs(192), runs(67, 125)], True),
    "three, the last one padding": ([runs(5, 186, 1), runs(100, 91, 1, ids=[3, 7, 0])], True),
    "four documents": ([runs(5, 100, 86, 1), runs(192)], False),
    "other documents of the keys": ([runs(192), runs(67, 125)], False),
    "one document in two pieces": ([runs(192), runs(60, 60, 72, ids=[1, 2, 1])], False),
}


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "all keys"])
def gradients(request):
    """The kernel's sum and gradients of q, k, v and documents, the plain ones, and cuDNN's calls.

    Both are compiled once for all rows.
    """
    calls = []

    def compiled(attention):
        def total(q, k, v, documents, of_keys):
            mask = AttentionMask(
                causal=request.param, query_segments=documents, key_segments=of_keys
            )
            return (attention(q, k, v, mask) ** 2).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))

    def by_kernel(q, k, v, mask):
        return module.attend(q, k, v, mask, scale=0.6, bias=None, dropout=None)

    def plain(q, k, v, mask):
        return reference(q, k, v, mask, scale=0.6)

    kinds = SimpleNamespace(PADDING="PADDING", PADDING_CAUSAL="PADDING_CAUSAL")
    private = SimpleNamespace(
        MaskType=kinds, dot_product_attention=lambda *a, **kw: packed(calls, *a, **kw)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_private", private)
        yield compiled(by_kernel), compiled(plain), calls


@pytest.mark.parametrize("name", ROWS)
def test_cudnn_gets_documents_in_one_piece_and_gpu_flash_the_others(
    name, gradients, rng, assert_equal
):
    by_kernel, plain, calls = gradients
    rows, by_cudnn = ROWS[name]
    q, k, v = (jnp.asarray(rng.standard_normal((2, LENGTH, n, 8)), jnp.float32) for n in (4, 2, 2))
    documents = np.stack(rows)
    of_keys = np.ones_like(documents) if "keys" in name else documents
    calls.clear()
    (given, slopes), (expected, others) = (
        f(q, k, v, documents, of_keys) for f in (by_kernel, plain)
    )
    assert_equal(given / expected, 1.0)
    for a, b in zip(slopes, others, strict=True):
        assert_equal(a, b, 1e-4)
    jax.effects_barrier()
    assert bool(calls) == by_cudnn


def test_jax_has_no_public_argument_for_packed_documents_yet():
    """Once it has one, `ops/attention/cudnn.py` uses it in place of the private function."""
    known = {
        *("query", "key", "value", "bias", "mask", "scale", "is_causal", "implementation"),
        *("query_seq_lengths", "key_value_seq_lengths", "local_window_size"),
        "return_residual",
    }
    assert set(inspect.signature(jax.nn.dot_product_attention).parameters) <= known


def test_a_jax_without_the_private_function_leaves_documents_to_gpu_flash(monkeypatch):
    assert module._takes_documents
    sizes = {"heads": 2, "kv_heads": 2, "key_size": 64, "value_size": 64, "queries": LENGTH}
    spec = AttentionSpec(batch=2, keys=LENGTH, dtype="bfloat16", segments=True, **sizes)
    assert not cudnn.why_not(spec, HOPPER)
    monkeypatch.setattr(module, "_takes_documents", False)
    assert cudnn.why_not(spec, HOPPER).endswith("with a JAX that has them")
