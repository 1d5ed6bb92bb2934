"""The attention function, in several implementations of one signature.

    kernel(q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], mask, *, scale, bias=None,
           dropout=None) -> [B, T, N, Hv]

Head n attends with key/value head n * K // N. `bias` [1 or B, N, T, S] is added to the scaled
logits. `dropout` acts on the weights. A query that may attend to nothing yields zeros. A kernel
refuses what it cannot do with a `ConfigError` that says so; none is exchanged for another unless
`Auto` is asked to choose, and it tells what it took.

| kernel | where | refuses |
|---|---|---|
| `reference` | everywhere | nothing |
| `blockwise` | everywhere, memory linear in T + S | nothing |
| `xla` | everywhere | dropout, values of another size |
| `cudnn` | NVIDIA GPUs | float32, dropout, segments, pairs, an offset, padding with a direction |
| `pallas` | TPUs | bias, dropout, pairs, a traced offset, lengths that 128 does not divide |
"""

from jaxformer.kernels.blockwise import blockwise
from jaxformer.kernels.call import Call, Machine
from jaxformer.kernels.choice import KERNELS, Auto, Choice, Kernel, choose, explain
from jaxformer.kernels.cudnn import cudnn
from jaxformer.kernels.pallas import pallas
from jaxformer.kernels.reference import attention_weights, reference
from jaxformer.kernels.xla import xla


def get(name: str) -> Kernel:
    """The kernel called `name`; `ValueError` lists the known names otherwise."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown: give one of {', '.join(KERNELS)}")
    return KERNELS[name]


__all__ = [
    "KERNELS",
    "Auto",
    "Call",
    "Choice",
    "Kernel",
    "Machine",
    "attention_weights",
    "blockwise",
    "choose",
    "cudnn",
    "explain",
    "get",
    "pallas",
    "reference",
    "xla",
]
