"""The facts that decide which functions compute a call, and functions of one kind of device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask, check_mask
from jaxformer.ops.partitioning import HEAD_AXES, partitioned

FLASH_RESIDUALS = "flash_attention"
"""The `checkpoint_name` of what a flash attention keeps for its backward pass besides its inputs:
the result and the logarithm of each row's sum."""

AMPERE = (8, 0)
"""The compute capability of NVIDIA's Ampere generation."""


class DeviceInfo(NamedTuple):
    """The kind of device that computes attention.

    `platform` is JAX's "cpu", "gpu" or "tpu", `kind` the device's name, `capability` NVIDIA's
    compute capability such as (9, 0), None for all other devices.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] | None = None

    @classmethod
    def current(cls) -> "DeviceInfo":
        """The devices of the mesh set with `jax.set_mesh`, else JAX's default device.

        The mesh may be of devices that are only compiled for.
        """
        device: Any = jax.sharding.get_abstract_mesh().abstract_device
        if device is None:
            # The option holds None, a device, or the name of a platform.
            chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
            is_device = isinstance(chosen, jax.Device)
            device = chosen if is_device else jax.local_devices(backend=chosen)[0]
        return cls(device.platform, device.device_kind, _capability(device))

    def __str__(self) -> str:
        named = self.kind and self.kind != self.platform
        return f"{self.platform} ({self.kind})" if named else self.platform


# NVIDIA's compute capability by a word of a device's name, for devices that are compiled for only.
_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
}


def _capability(device: Any) -> tuple[int, int] | None:
    """NVIDIA's compute capability, from an equal device of this process, else from the name."""
    if device.platform != "gpu":
        return None
    for real in [device, *jax.devices()]:
        if real.device_kind == device.device_kind and hasattr(real, "compute_capability"):
            numbers = str(real.compute_capability).split(".")
            if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                return int(numbers[0]), int(numbers[1])
    words = device.device_kind.replace("-", " ").split()
    known = [_CAPABILITIES[word] for word in words if word in _CAPABILITIES]
    return known[0] if "NVIDIA" in words and known else None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention call, as far as it is known while tracing.

    T = `queries`, S = `keys`, N = `heads`, K = `kv_heads`, H = `key_size`, Hv = `value_size`.
    `offset` is None if it is known only at run time. `padding_mask`, `segments`, `explicit` and
    `bias` say whether the call has one; `dropout` is the rate on the weights, `softcap` the bound
    of the logits, `from_cache` whether the keys are those of a cache.

    >>> sizes = {"heads": 4, "kv_heads": 2, "key_size": 16, "value_size": 16}
    >>> print(AttentionSpec(batch=2, queries=8, keys=8, dtype="float32", causal=True, **sizes))
    B=2 T=8 S=8 N=4 K=2 H=16 Hv=16 float32 causal
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
    padding_mask: bool = False
    segments: bool = False
    explicit: bool = False
    bias: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    from_cache: bool = False

    @classmethod
    def create(
        cls,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        bias: Float[Array, "#B N T S"] | None,
        dropout: Dropout | None,
        softcap: float | None = None,
    ) -> "AttentionSpec":
        """The spec of a call with these arguments."""
        check_mask(mask, (len(q), q.shape[1], k.shape[1]))
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
            padding_mask=mask.padding_mask is not None,
            segments=mask.query_segments is not None,
            explicit=mask.explicit is not None,
            bias=bias is not None,
            dropout=0.0 if dropout is None or dropout.dropout_rng is None else dropout.rate,
            softcap=softcap,
            from_cache=mask.from_cache,
        )

    @property
    def num_weights(self) -> int:
        """The number of attention weights, B N T S."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def cached(self) -> bool:
        """Whether the keys are those of a cache, whose masks have an offset known at run time."""
        return self.offset is None

    def __str__(self) -> str:
        words = [
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads}",
            f"H={self.key_size} Hv={self.value_size} {self.dtype}",
        ]
        words += ["causal"] if self.causal else []
        words += [f"window={self.window}"] if self.window is not None else []
        if self.offset != 0:
            words.append(f"offset={'traced' if self.offset is None else self.offset}")
        flags = ("padding_mask", "segments", "explicit", "bias")
        words += [name for name in flags if getattr(self, name)]
        words += [f"dropout={self.dropout}"] if self.dropout else []
        words += [f"softcap={self.softcap}"] if self.softcap is not None else []
        return " ".join(words)


def on_mesh(
    attend: Callable[..., Array], spec: AttentionSpec, heads: Sequence[int | None], out: int
) -> Callable[..., Array]:
    """`attend`, mapped over the devices of the current mesh.

    XLA does not divide a Pallas call, so `jax.shard_map` does. If the mesh axes "tensor" and
    "sequence" divide the number of heads, each device computes its own heads. `heads` is the axis
    of the heads in each argument (None: it has none), `out` that in the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(partitioned(HEAD_AXES))
    if not axes or mesh.size == 1:
        return attend
    divided = heads_per_device(spec) != (spec.heads, spec.kv_heads)

    def part(axis: int | None) -> PartitionSpec:
        if axis is None or not divided:
            return PartitionSpec()
        return PartitionSpec(*[None] * axis, axes)

    specs = tuple(map(part, heads))
    auto = {*mesh.auto_axes}  # the strategy has already mapped over the other axes
    return jax.shard_map(
        attend, in_specs=specs, out_specs=part(out), axis_names=auto, check_vma=False
    )


def heads_per_device(spec: AttentionSpec) -> tuple[int, int]:
    """The heads of queries and of keys that each device of the current mesh computes."""
    parts = math.prod(partitioned().values())
    if spec.heads % parts or spec.kv_heads % parts:
        return spec.heads, spec.kv_heads
    return spec.heads // parts, spec.kv_heads // parts


class Call(NamedTuple):
    """One attention call with its spec, for a `DeviceFunction`."""

    spec: AttentionSpec
    device: DeviceInfo
    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, Hv]
    mask: AttentionMask
    scale: float
    bias: Array | None  # [1 or B, N, T, S]
    dropout: Dropout | None
    interpret: bool


@dataclass(frozen=True)
class DeviceFunction:
    """An attention function for one kind of device; the plain twin is `reference`.

    `reference` computes calls of fewer than `least_queries` queries, and calls with a cache that
    the function does not support, so that a model trained with it can decode. Any other call that
    it does not support is a `ConfigError` with the reasons.
    """

    name: str
    device: DeviceInfo
    """The oldest device that it runs on."""
    compute: Callable[[Call], Float[Array, "B T N Hv"]]
    dtypes: tuple[str, ...]
    lacks: tuple[str, ...]
    """The fields of `AttentionSpec` that it does not support."""
    limits: Callable[[AttentionSpec, DeviceInfo], list[str]]
    """Further reasons, each the end of "the ... attention function"."""
    least_queries: int = 1

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
        interpret: bool = False,
    ) -> Float[Array, "B T N Hv"]:
        """Attention; `interpret` runs Pallas kernels on any device, slowly, for tests."""
        spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
        device = self.device if interpret else DeviceInfo.current()
        reasons = self.unsupported_reasons(spec, device)
        is_decoding = spec.from_cache or spec.cached
        if reasons and (is_decoding or spec.queries < self.least_queries):
            return reference(
                q, k, v, mask, scale=scale, bias=bias, dropout=dropout, softcap=softcap
            )
        if reasons:
            raise ConfigError(
                f"the {self.name} attention function {'; it '.join(reasons)}: use 'reference' or "
                f"'blockwise' (the call is {spec})"
            )
        return self.compute(Call(spec, device, q, k, v, mask, scale, bias, dropout, interpret))

    def unsupported_reasons(self, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Why the function does not compute `spec` on `device`; empty where it does."""
        if device.platform != self.device.platform or (device.capability or ()) < (
            self.device.capability or ()
        ):
            return [f"needs {_KINDS[self.device.platform]}, not {device}"]
        reasons = [f"does not support {_NAMES[name]}" for name in self.lacks if getattr(spec, name)]
        if spec.dtype not in self.dtypes:
            reasons.append(f"supports {' and '.join(self.dtypes)}, not {spec.dtype}")
        if spec.queries < self.least_queries:
            reasons.append(f"leaves calls of fewer than {self.least_queries} queries to reference")
        return reasons + self.limits(spec, device)


_KINDS = {"gpu": "an NVIDIA GPU of the Ampere generation or later", "tpu": "a TPU"}
_NAMES = {
    "window": "a window",
    "cached": "an offset known only at run time",
    "segments": "segments: packed texts would see each other",
    "explicit": "explicit masks, such as that of a prefix LM",
    "bias": "a bias on the logits",
    "dropout": "dropout on attention weights",
    "softcap": "a soft cap on the logits",
}


def value_size_reasons(spec: AttentionSpec) -> list[str]:
    """Why an attention function with one size for keys and values cannot compute `spec`."""
    if spec.value_size == spec.key_size:
        return []
    return [f"needs values as large as keys, not {spec.key_size} and {spec.value_size}"]
