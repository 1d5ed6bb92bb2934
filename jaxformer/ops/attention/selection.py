"""The selection of an attention function for a call, with its reasons."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array
from jaxtyping import Float

from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.cudnn import cudnn
from jaxformer.ops.attention.gpu_flash import gpu_flash
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.spec import AttentionSpec, DeviceFunction, DeviceInfo
from jaxformer.ops.attention.tpu_flash import tpu_flash
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask


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
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T N Hv"]: ...


DEVICE_FUNCTIONS: dict[str, DeviceFunction] = {
    function.name: function for function in (cudnn, gpu_flash, tpu_flash)
}
"""The functions for one kind of device, the fastest first."""

ATTENTION_FNS: dict[str, AttentionFn] = {
    "reference": reference,
    "blockwise": blockwise,
    **DEVICE_FUNCTIONS,
}

_MANY_WEIGHTS = 2**28  # 1 GiB in float32, which each layer keeps for its backward pass
_MANY_ON_CPU = 2**26
_MANY_QUERIES_ON_CPU = 1024  # of a causal call, whose later keys `blockwise` does not visit


@dataclass(frozen=True)
class Selection:
    """The attention function called `name` for `spec` on `device`, and the `reason`.

    `others` says for each other name why it is not selected. As text, a selection is the
    explanation, one line for each attention function.
    """

    spec: AttentionSpec
    device: DeviceInfo
    name: str
    reason: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"attention {self.spec} on {self.device}",
            f"  selected: {self.name}: {self.reason}",
        ]
        lines += [f"  not {name}: it {why}" for name, why in self.others.items()]
        return "\n".join(lines)


def select(
    spec: AttentionSpec, device: DeviceInfo | None = None, refused: Collection[str] = ()
) -> Selection:
    """The fastest attention function that supports `spec` on `device` (None: the current one).

    Functions named in `refused` are passed over.

    `DEVICE_FUNCTIONS` come first, then `reference` and `blockwise`, which support every call.
    `blockwise` is selected from 2^28 weights B N T S on, because of its memory; on a CPU from 2^26
    on, and for causal calls from 1,024 queries on. Milliseconds of CPU time of a forward and a
    backward pass of 2 examples with 4 heads of 64 in float32 (two cores shared with other work,
    median of at least 5; JAX 0.10.2 with the options of `runtime`):

        causal, T = S =     64    256    512   1024   2048   4096   2048, not causal
        reference          0.8    8.5   33.5    129    490   1921                493
        blockwise          0.8    8.3   29.6     93    318   1193                563

    On an H200 such a pass takes `cudnn` 4.2 ms, `gpu_flash` 8.6 and `blockwise` 40.9 (8 examples,
    4,096 tokens, 16 heads of 128, causal, bfloat16; JAX 0.11.2). The choice on TPUs does not rest
    on measurements yet.

    >>> sizes = {"heads": 4, "kv_heads": 4, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=2, queries=128, keys=128, dtype="bfloat16", **sizes)
    >>> print(select(call, DeviceInfo("tpu", "TPU v5 lite")))
    attention B=2 T=128 S=128 N=4 K=4 H=64 Hv=64 bfloat16 causal on tpu (TPU v5 lite)
      selected: tpu_flash: the fastest that supports this call on a TPU
      not reference: it supports this call, but tpu_flash comes first
      not blockwise: it supports this call, but tpu_flash comes first
      not cudnn: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
      not gpu_flash: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
    """
    device = DeviceInfo.current() if device is None else device
    reasons = {
        name: "failed on this device"
        if name in refused
        else "; it ".join(function.unsupported_reasons(spec, device))
        for name, function in DEVICE_FUNCTIONS.items()
    }
    most = _MANY_ON_CPU if device.platform == "cpu" else _MANY_WEIGHTS
    if device.platform == "cpu" and spec.causal and spec.offset is not None:
        most = min(most, spec.num_weights // spec.queries * _MANY_QUERIES_ON_CPU)
    has_few = spec.num_weights < most
    general = ("reference", "blockwise") if has_few else ("blockwise", "reference")
    name = next((name for name, why in reasons.items() if not why), general[0])
    if name in DEVICE_FUNCTIONS:
        reason = f"the fastest that supports this call on a {device.platform.upper()}"
    else:
        side = "below" if has_few else "at least"
        reason = f"B x N x T x S is {spec.num_weights:,}, {side} {most:,}"
    later = f"supports this call, but {name} comes first"
    others = {other: reasons.get(other) or later for other in ATTENTION_FNS if other != name}
    return Selection(spec, device, name, reason, others)


class AutoAttention:
    """An attention function that computes each call with the one that `select` selects.

    It selects while it is traced, for the devices of the current mesh. `selections` holds what it
    selected so far. `on_select` is called when it selects a function for the first time. A function
    for one kind of device is used only where `accept(selection)` is true: see `first_contact`.

        model = DecoderOnly(config, AutoAttention(on_select=print))

    >>> attention = jf.AutoAttention()
    >>> q = k = v = jnp.ones((2, 3, 1, 4))
    >>> attention(q, k, v, jf.AttentionMask(), scale=0.5).shape
    (2, 3, 1, 4)
    >>> [selection.name for selection in attention.selections]
    ['reference']
    """

    def __init__(
        self,
        on_select: Callable[[Selection], Any] | None = None,
        accept: Callable[[Selection], bool] | None = None,
    ):
        self.selections: list[Selection] = []
        self._on_select = on_select
        self._accept = accept

    def __eq__(self, other: object) -> bool:
        """Whether `other` selects alike: then a jitted function of a model is traced once."""
        return isinstance(other, AutoAttention) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

    @property
    def _settings(self) -> tuple[Any, Any]:
        return self._on_select, self._accept

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        *,
        scale: float,
        bias: Float[Array, "#B N T S"] | None = None,
        dropout: Dropout | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Attention by the selected function."""
        selection = self._select(AttentionSpec.create(q, k, v, mask, bias, dropout, softcap))
        if selection not in self.selections:
            is_new = all(selection.name != earlier.name for earlier in self.selections)
            self.selections.append(selection)
            if self._on_select is not None and is_new:
                self._on_select(selection)
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        attention_fn = ATTENTION_FNS[selection.name]
        return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

    def _select(self, spec: AttentionSpec) -> Selection:
        refused: list[str] = []
        while True:
            selection = select(spec, refused=refused)
            if selection.name not in DEVICE_FUNCTIONS or self._accept is None:
                return selection
            if self._accept(selection):
                return selection
            refused.append(selection.name)
