"""The facts of a call of attention, and kernels: each with the reason why it cannot compute it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int32, UInt32

from jaxformer.errors import ConfigError
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.dropout import DropoutMask
from jaxformer.ops.manual_axes import check_differentiable, vary_alike
from jaxformer.ops.masks import AttentionMask, check_mask
from jaxformer.ops.partitioning import HEAD_AXES, partitioned

FLASH_RESIDUALS = "flash_attention"
"""The `checkpoint_name` of what a flash attention keeps for its backward pass besides its inputs:
the result and the logarithm of each row's sum."""

ROW_AXES = ("data",)
"""The mesh axes that divide the rows of a call outside of a strategy's step."""

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


# NVIDIA's compute capabilities, for devices that are compiled for only: the words of their names.
_CAPABILITIES = {
    word: capability
    for capability, words in {
        (7, 0): "V100",
        (7, 5): "T4",
        (8, 0): "A100 A30",
        (8, 6): "A10 A10G A40 A6000",
        (8, 9): "L4 L40 L40S Ada",
        (9, 0): "H100 H200 GH200",
        (10, 0): "B200 GB200",
        (10, 3): "B300 GB300",
        (12, 0): "Blackwell",
    }.items()
    for word in words.split()
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
    of the logits, `from_cache` whether the keys come from a cache.

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
        bias: Float[Array, "#B N T S"] | None = None,
        dropout: DropoutMask | None = None,
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
            dropout=0.0 if dropout is None else dropout.rate,
            softcap=softcap,
            from_cache=mask.from_cache,
        )

    @property
    def num_weights(self) -> int:
        """The number of attention weights, B N T S."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def has_traced_offset(self) -> bool:
        """Whether the offset is known only at run time."""
        return self.offset is None

    def __str__(self) -> str:
        words = [
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads}",
            f"H={self.key_size} Hv={self.value_size} {self.dtype}",
        ]
        for field in fields(self)[8:-1]:  # those with a default, but for `from_cache`
            value = getattr(self, field.name)
            if value is True:
                words.append(field.name)
            elif value != field.default:
                words.append(f"{field.name}={'traced' if value is None else value}")
        return " ".join(words)


class Divided(NamedTuple):
    """The axes of an array that the devices of a mesh divide; `heads` None: it has no heads."""

    rows: int = 0
    heads: int | None = 2


def on_mesh(
    attend: Callable[..., Array], spec: AttentionSpec, arguments: Sequence[Divided]
) -> Callable[..., Array]:
    """`attend`, mapped over the devices of the current mesh.

    XLA does not divide a call of a kernel, so `jax.shard_map` does: each device computes its part
    of the call (`part_of_device`). `arguments` are the axes of each argument, or of all arrays of
    one that is a tree; an array without rows, or with one for all, is whole on each device.
    """

    def attend_alike(*given: Any) -> Array:
        return attend(*vary_alike(given))

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.auto_axes or mesh.size == 1:
        return attend_alike
    part = part_of_device(spec)
    row_axes = ROW_AXES if part.batch < spec.batch else None
    head_axes = tuple(partitioned(HEAD_AXES)) if part.heads < spec.heads else None

    def divide(shape: tuple[int, ...], axes: Divided) -> PartitionSpec:
        entries: list[Any] = [None] * len(shape)
        if axes.rows < len(shape) and shape[axes.rows] == spec.batch:
            entries[axes.rows] = row_axes
        if axes.heads is not None:
            entries[axes.heads] = head_axes
        return PartitionSpec(*entries)

    def mapped(*given: Any) -> Array:
        check_differentiable(given)
        in_specs = tuple(
            jax.tree.map(lambda leaf, axes=axes: divide(leaf.shape, axes), argument)
            for argument, axes in zip(given, arguments, strict=True)
        )
        out_shape = spec.batch, spec.queries, spec.heads, spec.value_size
        return jax.shard_map(
            attend,
            in_specs=in_specs,
            out_specs=divide(out_shape, Divided()),
            axis_names={*mesh.auto_axes},
            check_vma=False,
        )(*given)

    return mapped


def part_of_device(spec: AttentionSpec) -> AttentionSpec:
    """The part of a call that each device of the current mesh computes.

    "data" divides the rows and "tensor" and "sequence" the heads, where they divide their number.
    Over axes that a program has mapped over itself, as the step of a strategy has over "data", the
    call is divided already.
    """
    row_parts, head_parts = (
        math.prod(partitioned(axes).values()) for axes in (ROW_AXES, HEAD_AXES)
    )
    if spec.batch % row_parts == 0:
        spec = replace(spec, batch=spec.batch // row_parts)
    if spec.heads % head_parts == spec.kv_heads % head_parts == 0:
        heads, kv_heads = spec.heads // head_parts, spec.kv_heads // head_parts
        spec = replace(spec, heads=heads, kv_heads=kv_heads)
    return spec


PADDING = np.iinfo(np.int32).min
"""The segment of padding keys, to which no query belongs."""


def segments_of(
    mask: AttentionMask, spec: AttentionSpec
) -> tuple[Int32[Array, "B T"], Int32[Array, "B S"]]:
    """The segments of queries and keys in `mask`, with padding as one of its own."""
    query, key = mask.query_segments, mask.key_segments
    if query is None or key is None:
        query = key = jnp.zeros((1, 1), jnp.int32)
    query = jnp.broadcast_to(jnp.asarray(query, jnp.int32), (spec.batch, spec.queries))
    key = jnp.broadcast_to(jnp.asarray(key, jnp.int32), (spec.batch, spec.keys))
    if mask.padding_mask is not None:
        key = jnp.where(mask.padding_mask, key, PADDING)
    return query, key


def row_words(dropout: DropoutMask | None, spec: AttentionSpec) -> UInt32[Array, "2 B N T"] | None:
    """The two words of each row of the dropout's mask; None without dropout."""
    if dropout is None:
        return None
    rows = spec.batch, spec.heads, spec.queries
    return jnp.asarray(dropout.dropout_rng.row_words(dropout.name, rows))


@dataclass(frozen=True)
class Kernel:
    """An attention function with the reason why it cannot compute a call.

    Called by itself, it raises a `ConfigError` with the reason, except that `reference` computes
    short calls and those with a cache, so that a model trained with it can decode.
    """

    name: str
    compute: Callable[..., Float[Array, "B T N Hv"]]
    """The attention function, for calls without a reason. A Pallas kernel is interpreted where the
    device is not its own."""
    reasons: Callable[[AttentionSpec, DeviceInfo], list[str]]
    """Why it does not compute a call on a device that it is for; empty where it does."""
    device: DeviceInfo | None = None
    """The oldest device that it is for; None: all devices."""
    least_queries: int = 1
    """Calls with fewer queries are left to `reference`."""

    def why_not(self, spec: AttentionSpec, device: DeviceInfo) -> str:
        """The reasons why it does not compute `spec` on `device`; empty where it does."""
        least = self.device or device
        is_older = (device.capability or ()) < (least.capability or ())
        if device.platform != least.platform or is_older:
            return f"needs {_KINDS[least.platform]}, not {device}"
        reasons = self.reasons(spec, device)
        if spec.queries < self.least_queries:
            reasons.append(f"leaves calls of fewer than {self.least_queries} queries to reference")
        return "; it ".join(reasons)

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        *,
        scale: float,
        bias: Float[Array, "#B N T S"] | None = None,
        dropout: DropoutMask | None = None,
        softcap: float | None = None,
        interpret: bool = False,
    ) -> Float[Array, "B T N Hv"]:
        """Attention; `interpret` runs Pallas kernels on any device, slowly, for tests."""
        options: dict[str, Any] = {"bias": bias, "dropout": dropout, "softcap": softcap}
        spec = AttentionSpec.create(q, k, v, mask, **options)
        device = self.device if interpret and self.device else DeviceInfo.current()
        why_not = self.why_not(spec, device)
        is_decoding = spec.from_cache or spec.has_traced_offset
        if why_not and (is_decoding or spec.queries < self.least_queries):
            return reference(q, k, v, mask, scale=scale, **options)
        if why_not:
            raise ConfigError(
                f"the {self.name} attention function {why_not}: use 'reference' or 'blockwise' "
                f"(the call is {spec})"
            )
        return self.compute(q, k, v, mask, scale=scale, **options)


_KINDS = {"gpu": "an NVIDIA GPU of the Ampere generation or later", "tpu": "a TPU"}
_NAMES = {
    "window": "a window",
    "has_traced_offset": "an offset known only at run time",
    "segments": "segments: packed texts would see each other",
    "explicit": "explicit masks, such as a prefix LM's",
    "bias": "a bias on the logits",
    "dropout": "dropout on attention weights",
    "softcap": "a soft cap on the logits",
}


def unsupported(spec: AttentionSpec, dtypes: Sequence[str], lacks: Sequence[str]) -> list[str]:
    """The reasons of a kernel for `dtypes` that lacks these fields of `AttentionSpec`."""
    reasons = [f"does not support {_NAMES[name]}" for name in lacks if getattr(spec, name)]
    if spec.dtype not in dtypes:
        reasons.append(f"supports {' and '.join(dtypes)}, not {spec.dtype}")
    return reasons
