"""Attention functions: several implementations of one signature.

    attention_fn(q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], mask, *, scale, bias=None,
                 dropout=None, softcap=None) -> [B, T, N, Hv]

Head n attends with key/value head n * K // N. `bias` [1 or B, N, T, S] is added to the scaled
logits. `dropout` acts on the weights. With `softcap` c, which is given only where the config has
one, the scaled logits x become c tanh(x / c) before the bias. A query that may attend to no key
gets zeros. `plain` is the formula for readers, the plain twin of all; `reference` is what runs
where no kernel does.

A kernel for one kind of device raises a `ConfigError` with the reason for a call that it cannot
compute, except that `reference` computes short calls and those with a cache, so that a model
trained with it decodes. `auto_attention` takes the first of `KERNELS` that can; `explain` says why.

| attention function | devices | does not support |
|---|---|---|
| `reference` | all | |
| `blockwise` | all, memory linear in T + S | |
| `cudnn` | NVIDIA | float32, dropout, soft cap, segments before Hopper, offsets, big heads |
| `gpu_flash` | NVIDIA | bias, soft cap, explicit masks, heads of more than 128 |
| `tpu_flash` | TPU | bias, explicit masks, lengths below 512 not divisible by 128 |
| `tpu_decode` | TPU, few queries and a cache | bias, explicit masks, segments, padding, dropout |
"""

from jaxformer.ops.attention.auto import (
    ATTENTION_FNS,
    KERNELS,
    AttentionFn,
    auto_attention,
    check_attention_fn,
    choose,
    explain,
)
from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.cudnn import cudnn
from jaxformer.ops.attention.gpu_flash import gpu_flash
from jaxformer.ops.attention.kernel import AttentionSpec, DeviceInfo, Kernel
from jaxformer.ops.attention.plain import plain
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.tpu_decode import tpu_decode
from jaxformer.ops.attention.tpu_flash import tpu_flash

__all__ = [
    "ATTENTION_FNS",
    "KERNELS",
    "AttentionFn",
    "AttentionSpec",
    "DeviceInfo",
    "Kernel",
    "auto_attention",
    "blockwise",
    "check_attention_fn",
    "choose",
    "cudnn",
    "explain",
    "gpu_flash",
    "plain",
    "reference",
    "tpu_decode",
    "tpu_flash",
]
