"""Attention functions: several implementations of one signature.

    attention_fn(q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], mask, *, scale, bias=None,
                 dropout=None, softcap=None) -> [B, T, N, Hv]

Head n attends with key/value head n * K // N. `bias` [1 or B, N, T, S] is added to the scaled
logits. `dropout` acts on the weights. With `softcap` c, which is given only where the config has
one, the scaled logits x become c tanh(x / c) before the bias. A query that may attend to no key
gets zeros. The plain twin of all is `reference`.

A function for one kind of device (`DeviceFunction`) raises a `ConfigError` for a call that it does
not support, except that `reference` computes short calls and those with a cache, so that a model
trained with it can decode. `AutoAttention` selects a function for each call and records which.

| attention function | devices | does not support |
|---|---|---|
| `reference` | all | |
| `blockwise` | all, memory linear in T + S | |
| `cudnn` | NVIDIA | float32, dropout, soft cap, segments, offsets, big heads, causal padding |
| `gpu_flash` | NVIDIA | bias, soft cap, explicit masks, heads of more than 128 |
| `tpu_flash` | TPU | bias, explicit masks, lengths below 512 not divisible by 128 |
"""

from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.cudnn import cudnn
from jaxformer.ops.attention.gpu_flash import gpu_flash
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.selection import (
    ATTENTION_FNS,
    DEVICE_FUNCTIONS,
    AttentionFn,
    AutoAttention,
    Selection,
    select,
)
from jaxformer.ops.attention.spec import AttentionSpec, DeviceFunction, DeviceInfo
from jaxformer.ops.attention.tpu_flash import tpu_flash

__all__ = [
    "ATTENTION_FNS",
    "DEVICE_FUNCTIONS",
    "AttentionFn",
    "AttentionSpec",
    "AutoAttention",
    "DeviceFunction",
    "DeviceInfo",
    "Selection",
    "blockwise",
    "cudnn",
    "gpu_flash",
    "reference",
    "select",
    "tpu_flash",
]
