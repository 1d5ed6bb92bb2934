"""What decides which kernels can compute an attention: its shapes, its facts, the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxformer.config import ConfigError
from jaxformer.dropout import Dropout
from jaxformer.masks import Mask


class Machine(NamedTuple):
    """Where attention is to be computed.

    `platform` is JAX's "cpu", "gpu" or "tpu", `kind` the device's name, `capability` NVIDIA's
    compute capability such as (9, 0), None for all other devices.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None

    @classmethod
    def here(cls) -> "Machine":
        """The machine of JAX's first device."""
        device = jax.devices()[0]
        numbers = str(getattr(device, "compute_capability", "")).split(".")
        known = len(numbers) == 2 and all(number.isdigit() for number in numbers)
        capability = (int(numbers[0]), int(numbers[1])) if known else None
        return cls(device.platform, device.device_kind, capability)

    def __str__(self) -> str:
        named = self.kind and self.kind != self.platform
        return f"{self.platform} ({self.kind})" if named else self.platform


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention, as far as it is known while tracing.

    T = `queries`, S = `keys`, N = `heads`, K = `kv_heads`, H = `key_size`, Hv = `value_size`.
    `offset` None is one that is known only at run time. `key_valid`, `segments`, `pairs` and
    `bias` say whether there is one; `dropout` is the rate on the weights, 0 without noise.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: str
    causal: bool = False
    window: int | None = None
    offset: int | None = 0
    key_valid: bool = False
    segments: bool = False
    pairs: bool = False
    bias: bool = False
    dropout: float = 0.0

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        bias: jax.Array | None,
        dropout: Dropout | None,
    ) -> "Call":
        """The facts of a kernel's arguments."""
        dtypes = sorted({str(x.dtype) for x in (q, k, v)})
        return cls(
            batch=q.shape[0],
            queries=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            key_size=k.shape[3],
            value_size=v.shape[3],
            dtype=" and ".join(dtypes),
            causal=mask.causal,
            window=mask.window,
            offset=mask.offset if isinstance(mask.offset, int) else None,
            key_valid=mask.key_valid is not None,
            segments=mask.query_segments is not None,
            pairs=mask.pairs is not None,
            bias=bias is not None,
            dropout=0.0 if dropout is None or dropout.noise is None else dropout.rate,
        )

    @property
    def weights(self) -> int:
        """How many weights there are: B N T S."""
        return self.batch * self.heads * self.queries * self.keys

    def __str__(self) -> str:
        words = [
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads}",
            f"H={self.key_size} Hv={self.value_size} {self.dtype}",
        ]
        words += ["causal"] if self.causal else []
        words += [f"window={self.window}"] if self.window is not None else []
        if self.offset != 0:
            words.append(f"offset={'traced' if self.offset is None else self.offset}")
        facts = {"padding": self.key_valid, "segments": self.segments, "pairs": self.pairs}
        facts |= {"bias": self.bias}
        words += [name for name, present in facts.items() if present]
        words += [f"dropout={self.dropout}"] if self.dropout else []
        return " ".join(words)


def refuse(kernel: str, refusals: Sequence[str]) -> None:
    """Raises `ConfigError` if there are `refusals`, the ends of sentences "the kernel ..."."""
    if refusals:
        raise ConfigError(f"the {kernel} kernel " + "; it ".join(refusals))


def refuse_dropout(call: Call) -> list[str]:
    """The refusal of a kernel that cannot drop weights."""
    if call.dropout == 0:
        return []
    return [
        f"has no dropout on attention weights by row, but rate={call.dropout} was given: use the "
        "reference or the blockwise kernel, or attention_dropout_rate=0"
    ]


def refuse_pairs(call: Call) -> list[str]:
    """The refusal of a kernel that is not told of a mask's matrix."""
    if not call.pairs:
        return []
    return [
        "is not told which pairs of tokens see each other, as beams with one cache are: use the "
        "reference or the blockwise kernel"
    ]


def refuse_value_size(call: Call) -> list[str]:
    """The refusal of a kernel that has one size for keys and values."""
    if call.value_size == call.key_size:
        return []
    return [
        f"needs values of the keys' size, but head_dim={call.key_size} and "
        f"value_head_dim={call.value_size}: use the reference or the blockwise kernel"
    ]
