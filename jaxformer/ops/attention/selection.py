"""Which attention function a call gets, and why the others are not selected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.cudnn import cudnn, cudnn_unsupported_reasons
from jaxformer.ops.attention.gpu_flash import gpu_flash, gpu_flash_unsupported_reasons
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.spec import AttentionSpec, DeviceInfo
from jaxformer.ops.attention.tpu_flash import tpu_flash, tpu_flash_unsupported_reasons
from jaxformer.ops.attention.tpu_splash import tpu_splash, tpu_splash_unsupported_reasons
from jaxformer.ops.attention.xla import xla, xla_unsupported_reasons
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


ATTENTION_FNS: dict[str, AttentionFn] = {
    "reference": reference,
    "xla": xla,
    "blockwise": blockwise,
    "cudnn": cudnn,
    "gpu_flash": gpu_flash,
    "tpu_flash": tpu_flash,
    "tpu_splash": tpu_splash,
}

_UNSUPPORTED_REASONS = {
    "xla": xla_unsupported_reasons,
    "cudnn": cudnn_unsupported_reasons,
    "gpu_flash": gpu_flash_unsupported_reasons,
    "tpu_flash": tpu_flash_unsupported_reasons,
    "tpu_splash": tpu_splash_unsupported_reasons,
}

_FEW_QUERIES = 16  # decoding has fewer, and therefore few weights
_MANY_WEIGHTS = 2**28  # 1 GiB in float32, which each layer keeps for its backward pass
_MANY_ON_CPU = 2**26


def get(name: str) -> AttentionFn:
    """The attention function called `name`; `ConfigError` lists the names if it is unknown.

    >>> from jaxformer.ops import attention
    >>> attention.get("blockwise") is attention.blockwise
    True
    """
    if name not in ATTENTION_FNS:
        known = ", ".join(ATTENTION_FNS)
        raise ConfigError(f"attention function {name!r} is unknown: give one of {known}")
    return ATTENTION_FNS[name]


def check_attention_fn(attention_fn: Any) -> None:
    """Raises `ConfigError` for whatever cannot be called, such as the name of a function.

    >>> check_attention_fn(reference)
    >>> check_attention_fn(7)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: attention_fn=7 is of type int, not a function: give ...
    """
    if callable(attention_fn):
        return
    kind = "a string" if isinstance(attention_fn, str) else f"of type {type(attention_fn).__name__}"
    raise ConfigError(
        f"attention_fn={attention_fn!r} is {kind}, not a function: give AutoAttention(), or one of "
        f"ATTENTION_FNS[...] with {', '.join(map(repr, ATTENTION_FNS))}"
    )


@dataclass(frozen=True)
class Selection:
    """The attention function called `name` for `spec` on `device`, and the `reason`.

    `others` says for each other name why it is not selected. As text, a selection is the
    explanation, one line for each attention function.

    >>> sizes = {"heads": 4, "kv_heads": 4, "key_size": 16, "value_size": 16}
    >>> call = AttentionSpec(batch=2, queries=8, keys=8, dtype="float32", **sizes)
    >>> selection = select(call, DeviceInfo("cpu"))
    >>> selection.name, selection.reason  # 2 x 4 x 8 x 8 weights
    ('reference', 'B x N x T x S is 512, below 67,108,864')
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


def select(spec: AttentionSpec, device: DeviceInfo | None = None) -> Selection:
    """The fastest attention function that supports `spec` on `device` (None: the current one).

    On an NVIDIA GPU cuDNN comes first, and `gpu_flash` where cuDNN does not support a call of at
    least 16 queries; on a TPU `tpu_flash`, and splash attention for what it does not support. After
    them come `reference` and
    `blockwise`, which support every call. Of these two, `blockwise` is selected from 2^28 weights
    B N T S on, because of its memory; on a CPU from 2^26 on, where it is about as fast. `xla` is
    never selected. Milliseconds of a forward and a backward pass of 2 examples with 4 heads of 64
    in float32 (two cores shared with other work, least of at least 5; JAX 0.10.2 with the options
    of `runtime`):

        causal, T = S =     64    256    512   1024   2048   4096   2048, not causal
        reference         1.18   13.7   28.1    119    333   1162                288
        blockwise         1.35   14.0   42.9    135    403   1019                493
        xla               1.05   16.3   52.9    199    893      -                778

    The choice on GPUs and TPUs does not rest on measurements yet.

    >>> sizes = {"heads": 8, "kv_heads": 8, "key_size": 64, "value_size": 64}
    >>> short = AttentionSpec(batch=2, queries=512, keys=512, dtype="float32", **sizes)
    >>> long = AttentionSpec(batch=2, queries=4096, keys=4096, dtype="float32", **sizes)
    >>> [select(call, DeviceInfo("cpu")).name for call in (short, long)]
    ['reference', 'blockwise']
    """
    device = DeviceInfo.current() if device is None else device
    reasons = {name: find(spec, device) for name, find in _UNSUPPORTED_REASONS.items()}
    others = {name: "; it ".join(found) for name, found in reasons.items() if found}
    if "gpu_flash" not in others and spec.queries < _FEW_QUERIES:
        others["gpu_flash"] = f"supports this call, but saves nothing below {_FEW_QUERIES} queries"
    made_for_devices = "cudnn", "gpu_flash", "tpu_flash", "tpu_splash"
    supported = [name for name in made_for_devices if name not in others]
    if supported:
        name = supported[0]
        reason = f"made for {device.platform}s, and it supports this call"
        later = f"supports this call, but {name} is made for this device"
        others |= dict.fromkeys(("reference", "blockwise"), later)
        others |= dict.fromkeys(supported[1:], f"supports this call, but {name} comes first")
    else:
        name, other, reason = _select_by_memory(spec, device)
        others[other] = f"supports this call, but {name} is preferred: {reason}"
    others.setdefault("xla", "computes what reference computes, with its memory and no faster")
    others = {other: others[other] for other in ATTENTION_FNS if other != name}
    return Selection(spec, device, name, reason, others)


def _select_by_memory(spec: AttentionSpec, device: DeviceInfo) -> tuple[str, str, str]:
    """The selected one of `reference` and `blockwise`, the other one, and the reason."""
    bound = _MANY_ON_CPU if device.platform == "cpu" else _MANY_WEIGHTS
    counted = f"B x N x T x S is {spec.num_weights:,}"
    if spec.num_weights < bound:
        return "reference", "blockwise", f"{counted}, below {bound:,}"
    return "blockwise", "reference", f"{counted}, at least {bound:,}"


def explain(spec: AttentionSpec, device: DeviceInfo | None = None) -> str:
    """A text: what `select` selects for `spec` on `device` (None: the current one), and why.

    >>> sizes = {"heads": 4, "kv_heads": 4, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=2, queries=128, keys=128, dtype="bfloat16", **sizes)
    >>> print(explain(call, DeviceInfo("tpu", "TPU v5 lite")))
    attention B=2 T=128 S=128 N=4 K=4 H=64 Hv=64 bfloat16 causal on tpu (TPU v5 lite)
      selected: tpu_flash: made for tpus, and it supports this call
      not reference: it supports this call, but tpu_flash is made for this device
      not xla: it computes what reference computes, with its memory and no faster
      not blockwise: it supports this call, but tpu_flash is made for this device
      not cudnn: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
      not gpu_flash: it needs an NVIDIA GPU of the Ampere generation or later, not tpu (TPU v5 lite)
      not tpu_splash: it supports this call, but tpu_flash comes first
    """
    return str(select(spec, device))


class AutoAttention:
    """An attention function that computes each call with the one that `select` selects.

    It selects while it is traced, for the devices of the current mesh. `selections` holds what it
    selected so far. `on_select` is called when it selects a function for the first time.

        model = DecoderOnly(config, AutoAttention(on_select=print))

    >>> attention = jf.AutoAttention()
    >>> q = k = v = jnp.ones((2, 3, 1, 4))
    >>> attention(q, k, v, jf.AttentionMask(), scale=0.5).shape
    (2, 3, 1, 4)
    >>> [selection.name for selection in attention.selections]
    ['reference']
    """

    def __init__(self, on_select: Callable[[Selection], Any] | None = None):
        self.selections: list[Selection] = []
        self._on_select = on_select

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
        selection = select(AttentionSpec.create(q, k, v, mask, bias, dropout, softcap))
        self._record(selection)
        attention_fn = ATTENTION_FNS[selection.name]
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

    def _record(self, selection: Selection) -> None:
        if selection in self.selections:
            return
        is_new = all(selection.name != earlier.name for earlier in self.selections)
        self.selections.append(selection)
        if self._on_select is not None and is_new:
            self._on_select(selection)
