"""The attention function, in several implementations of one signature.

    kernel(q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], mask, *, scale, bias=None,
           dropout=None) -> [B, T, N, Hv]

Head n attends with key/value head n * K // N. `bias` [1 or B, N, T, S] is added to the scaled
logits. `dropout` acts on the weights. A query that may attend to nothing yields zeros. A kernel
refuses what it cannot do with a `ValueError` that says so.
"""

from collections.abc import Callable

import jax

from jaxformer.kernels.blockwise import blockwise
from jaxformer.kernels.reference import attention_weights, reference
from jaxformer.kernels.xla import xla

Kernel = Callable[..., jax.Array]

KERNELS: dict[str, Kernel] = {"reference": reference, "xla": xla, "blockwise": blockwise}


def get(name: str) -> Kernel:
    """The kernel called `name`; `ValueError` lists the known names otherwise."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown: give one of {', '.join(KERNELS)}")
    return KERNELS[name]


__all__ = ["KERNELS", "Kernel", "attention_weights", "blockwise", "get", "reference", "xla"]
