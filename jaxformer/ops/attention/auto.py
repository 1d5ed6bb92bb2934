"""The kernels of attention: the first that can compute a call is taken."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.cudnn import cudnn
from jaxformer.ops.attention.gpu_flash import gpu_flash
from jaxformer.ops.attention.kernel import AttentionSpec, DeviceInfo, Kernel
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.tpu_decode import tpu_decode
from jaxformer.ops.attention.tpu_flash import tpu_flash
from jaxformer.ops.dropout import DropoutMask
from jaxformer.ops.masks import AttentionMask


@runtime_checkable
class AttentionFn(Protocol):
    """The signature of every attention function; `jaxformer.ops.attention` describes it.

    With `config.attention.softcap` a function also gets the argument `softcap`, a number.

    >>> def first_key(q, k, v, mask, *, scale, bias=None, dropout=None):  # all weight on key 0
    ...     return jnp.broadcast_to(v[:, :1], (*q.shape[:3], v.shape[3]))
    >>> attention = jf.MultiHeadAttention(num_heads=2, attention_fn=first_key)
    >>> x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    >>> out, _ = attention.init_with_output(jax.random.key(1), x)
    >>> bool((out[:, 1] == out[:, 0]).all())
    True
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        /,
        *,
        scale: float,
        bias: Float[Array, "#B N T S"] | None = None,
        dropout: DropoutMask | None = None,
    ) -> Float[Array, "B T N Hv"]: ...


_MANY_WEIGHTS = 2**28  # 1 GiB in float32, which each layer keeps for its backward pass
_MANY_ON_CPU = 2**26
_MANY_QUERIES_ON_CPU = 1024  # of a causal call, whose later keys `blockwise` does not visit


def _few_weights(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `blockwise` is not worth its time.

    Milliseconds of CPU time of a forward and a backward pass of 2 examples with 4 heads of 64 in
    float32 (two cores shared with other work, median of at least 5; JAX 0.10.2 with the options of
    `runtime`):

        causal, T = S =     64    256    512   1024   2048   4096   2048, not causal
        reference          0.8    8.5   33.5    129    490   1921                493
        blockwise          0.8    8.3   29.6     93    318   1193                563
    """
    most = _MANY_ON_CPU if device.platform == "cpu" else _MANY_WEIGHTS
    if device.platform == "cpu" and spec.causal and spec.offset is not None:
        most = min(most, spec.num_weights // spec.queries * _MANY_QUERIES_ON_CPU)
    if spec.num_weights >= most:
        return []
    return [f"is for B x N x T x S of {most:,} or more, not {spec.num_weights:,}"]


KERNELS: tuple[Kernel, ...] = (
    cudnn,
    gpu_flash,
    tpu_flash,
    tpu_decode,
    Kernel("blockwise", blockwise, _few_weights),
    Kernel("reference", reference, lambda spec, device: []),
)
"""The fastest first. The last one computes every call.

On an H200 a forward and a backward pass takes `cudnn` 4.2 ms, `gpu_flash` 8.6 and `blockwise` 40.9
(8 examples, 4,096 tokens, 16 heads of 128, causal, bfloat16; JAX 0.11.2). The order on TPUs does
not rest on measurements yet.
"""


def choose(
    spec: AttentionSpec,
    device: DeviceInfo | None = None,
    accept: Callable[[Kernel], bool] = lambda kernel: True,
) -> Kernel:
    """The first of `KERNELS` that computes `spec` on `device` (None: the current one).

    A kernel for one kind of device is passed over where `accept` is false.
    """
    device = DeviceInfo.current() if device is None else device
    return next(
        kernel
        for kernel in KERNELS
        if not kernel.why_not(spec, device) and (kernel.device is None or accept(kernel))
    )


def explain(
    spec: AttentionSpec,
    device: DeviceInfo | None = None,
    accept: Callable[[Kernel], bool] = lambda kernel: True,
) -> str:
    """The kernel that `choose` takes, and why it passes over those before it.

    >>> sizes = {"heads": 4, "kv_heads": 4, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=2, queries=128, keys=128, dtype="bfloat16", **sizes)
    >>> print(explain(call, DeviceInfo("tpu", "TPU v5 lite")))
    attention B=2 T=128 S=128 N=4 K=4 H=64 Hv=64 bfloat16 causal on tpu (TPU v5 lite): tpu_flash
      not cudnn: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
      not gpu_flash: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
    """
    device = DeviceInfo.current() if device is None else device
    chosen = choose(spec, device, accept)
    lines = [f"attention {spec} on {device}: {chosen.name}"]
    for kernel in KERNELS[: KERNELS.index(chosen)]:
        why_not = kernel.why_not(spec, device) or "failed on this device"
        lines.append(f"  not {kernel.name}: it {why_not}")
    return "\n".join(lines)


def auto_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention by the first of `KERNELS` that computes the call on the devices of the mesh.

    >>> q = k = v = jnp.ones((2, 3, 1, 4))
    >>> auto_attention(q, k, v, jf.AttentionMask(), scale=0.5).shape
    (2, 3, 1, 4)
    """
    options: dict[str, Any] = {"bias": bias, "dropout": dropout, "softcap": softcap}
    kernel = choose(AttentionSpec.create(q, k, v, mask, **options))
    return kernel.compute(q, k, v, mask, scale=scale, **options)


ATTENTION_FNS: dict[str, AttentionFn] = {
    "reference": reference,
    "blockwise": blockwise,
    "cudnn": cudnn,
    "gpu_flash": gpu_flash,
    "tpu_flash": tpu_flash,
    "auto": auto_attention,
}
"""The attention functions by name."""


def check_attention_fn(attention_fn: Any) -> None:
    """Raises `ConfigError`, with the names of `ATTENTION_FNS`, for what is no function."""
    if not callable(attention_fn):
        raise ConfigError(
            f"attention_fn={attention_fn!r} is not a function: give one of ATTENTION_FNS[...] with "
            f"{', '.join(map(repr, ATTENTION_FNS))}"
        )
