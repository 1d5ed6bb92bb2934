"""Model FLOPs utilization (MFU): the FLOPs of a step, and the peak FLOP/s of devices by name.

Matrix products count two FLOPs per multiply-add: projections, feed-forward networks, heads, and
attention to the keys that a query may see (a causal query at position t sees t + 1 keys).
Embedding look-ups, norms, softmax and the optimizer are not counted. A training step is three times
the forward pass: the backward pass has products for inputs and for weights. Recomputation (`remat`)
is not counted; padding and other documents in a row are.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.training.task import Cost
from jaxformer.config import TransformerConfig
from jaxformer.distributed import Strategy
from jaxformer.distributed.mesh import Device


class Accelerator(NamedTuple):
    """One device according to its data sheet.

    `bfloat16` and `float32` are the peak FLOP/s of matrix products without sparsity, at JAX's
    default precision (TensorFloat-32 on a GPU, bfloat16 on a TPU). `memory` is in bytes,
    `bandwidth` in bytes per second. JAX may use the `share` of the memory.
    """

    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    share: float

    @property
    def usable_memory(self) -> float:
        """Returns the bytes that JAX may use."""
        return self.memory * self.share


# JAX uses 0.75 of a GPU's memory by default (XLA_PYTHON_CLIENT_MEM_FRACTION; docs.jax.dev, "GPU
# memory allocation") and all of a TPU's.
_GPU, _TPU = 0.75, 1.0

ACCELERATORS = {
    # NVIDIA H100 datasheet, SXM: 1,979 and 989 TFLOPS with sparsity, half without.
    "h100": Accelerator(989.5e12, 494.7e12, 80e9, 3.35e12, _GPU),
    # NVIDIA H200 datasheet, SXM: the arithmetic of an H100.
    "h200": Accelerator(989.5e12, 494.7e12, 141e9, 4.8e12, _GPU),
    # NVIDIA A100 datasheet, SXM 80 GB.
    "a100": Accelerator(312e12, 156e12, 80e9, 2.039e12, _GPU),
    # NVIDIA L4 datasheet: 242 and 120 TFLOPS with sparsity, half without.
    "l4": Accelerator(121e12, 60e12, 24e9, 300e9, _GPU),
    # Google Cloud documentation, "TPU v5e", "TPU v5p" and "TPU v6e": a chip. The memory of v5e and
    # v6e is what libtpu 0.0.52 leaves to programs: 15.75 and 31.24 GiB.
    "v5e": Accelerator(197e12, 197e12, 15.75 * 2**30, 800e9, _TPU),
    "v5p": Accelerator(459e12, 459e12, 95e9, 2_765e9, _TPU),
    "v6e": Accelerator(918e12, 918e12, 31.24 * 2**30, 1_600e9, _TPU),
    # No product: 2 cores at 2.6 GHz, each 2 AVX2 multiply-adds of 8 float32 a cycle (16 x 2 FLOP),
    # one channel of DDR4-3200 (JEDEC: 25.6 GB/s), 16 GB; bfloat16 is computed as float32.
    "cpu": Accelerator(166e9, 166e9, 16e9, 25.6e9, 1.0),
}

DEVICE_KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA L4": "l4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
"""The accelerator of each `device_kind` of JAX. A CPU has none: its peak differs by machine."""


class Peak(NamedTuple):
    """The peak FLOP/s of `devices` devices of one `kind` in `dtype`.

    `each` is the peak of one device according to its data sheet, None for an unknown kind.
    """

    kind: str
    devices: int
    dtype: str
    each: float | None

    @property
    def total(self) -> float | None:
        """Returns the peak of all devices, None for an unknown kind."""
        return None if self.each is None else self.devices * self.each

    def __str__(self) -> str:
        """Returns the formula of `mfu` in one line."""
        if self.each is None:
            return f"no mfu: the peak FLOP/s of {self.kind} are not known"
        return (
            "mfu = 3 x FLOPs of the forward pass (2 per multiply-add, weights and attention to the "
            "keys that a query may see; without remat, with padding) / seconds / "
            f"({self.devices} x {self.each / 1e12:g} TFLOP/s, {self.kind}, {self.dtype})"
        )


def peak_of(devices: Strategy, dtype: str) -> Peak:
    """Returns the peak of the devices of a run's mesh."""
    kinds = {device.device_kind for device in devices.mesh.devices.flat}
    name = DEVICE_KINDS.get(next(iter(kinds))) if len(kinds) == 1 else None
    each = None if name is None else getattr(ACCELERATORS[name], dtype)
    return Peak(" and ".join(sorted(kinds)), devices.mesh.devices.size, dtype, each)


def memory_in_use(devices: Sequence[Device] | None = None) -> dict[str, float]:
    """Bytes in use, and the most so far, on the fullest of this process's devices.

    {} where the backend does not count, as on a CPU. None: all devices of this process.
    """
    counts = [device.memory_stats() or {} for device in devices or jax.local_devices()]
    names = {"memory": "bytes_in_use", "memory_peak": "peak_bytes_in_use"}
    return {
        name: float(max(count[key] for count in counts))
        for name, key in names.items()
        if all(key in count for count in counts)
    }


def rows_and_length(leaf: jax.Array | np.ndarray) -> tuple[int, int]:
    """Returns B and T of a leaf [..., T] of a sharded batch, where B may be several axes."""
    return math.prod(leaf.shape[:-1]), leaf.shape[-1]


_FORWARD_AND_BACKWARD = 3


def causal_flops(config: TransformerConfig, rows: int, length: int) -> int:
    """FLOPs of a step of a `DecoderOnly` on tokens [rows, length]."""
    positions = rows * length
    block = _self_attention(config, positions, rows * _triangle(length))
    block += _feed_forward(config, positions)
    head = 2 * positions * config.d_model * config.vocab_size
    return _FORWARD_AND_BACKWARD * (config.num_decoder_layers * block + head)


def masked_flops(config: TransformerConfig, rows: int, length: int, predicted: int) -> int:
    """FLOPs of a step of a `MaskedLanguageModel` on [rows, length], `predicted` masks per row."""
    positions, width = rows * length, config.d_model
    block = _self_attention(config, positions, rows * length**2)
    block += _feed_forward(config, positions)
    head = 2 * rows * predicted * width * (width + config.vocab_size)
    if config.pooler != "none":
        head += 2 * rows * width * (width + 2)
    return _FORWARD_AND_BACKWARD * (config.num_encoder_layers * block + head)


def seq2seq_flops(config: TransformerConfig, rows: int, source: int, target: int) -> int:
    """FLOPs of a step of an `EncoderDecoder` on source [rows, source], target [rows, target]."""
    read, written = rows * source, rows * target
    encoder = _self_attention(config, read, rows * source**2) + _feed_forward(config, read)
    decoder = _self_attention(config, written, rows * _triangle(target))
    decoder += _projections(config, written, read) + _attention(config, rows * source * target)
    decoder += _feed_forward(config, written)
    blocks = config.num_encoder_layers * encoder + config.num_decoder_layers * decoder
    head = 2 * written * config.d_model * config.vocab_size
    return _FORWARD_AND_BACKWARD * (blocks + head)


def seq2seq_cost(config: TransformerConfig, batch: Any) -> Cost:
    """The cost of a step on a placed `PairBatch`."""
    positions = batch.target.size - batch.example_ids.size
    sizes = *rows_and_length(batch.source), batch.target.shape[-1] - 1
    return Cost(positions, seq2seq_flops(config, *sizes))


def _triangle(length: int) -> int:
    """Returns the number of (query, key) pairs where the key is not after the query."""
    return length * (length + 1) // 2


def _self_attention(config: TransformerConfig, positions: int, pairs: int) -> int:
    return _projections(config, positions, positions) + _attention(config, pairs)


def _projections(config: TransformerConfig, queries: int, keys: int) -> int:
    """The projections of queries, keys and values, and the output projection."""
    heads = config.num_heads * (config.key_size + config.value_size)
    shared = config.kv_heads * (config.key_size + config.value_size)
    return 2 * config.d_model * (queries * heads + keys * shared)


def _attention(config: TransformerConfig, pairs: int) -> int:
    """Scores and weighted values of `pairs` (query, key) pairs."""
    return 2 * pairs * config.num_heads * (config.key_size + config.value_size)


def _feed_forward(config: TransformerConfig, positions: int) -> int:
    matrices = 3 if config.feed_forward.gated else 2
    return 2 * positions * matrices * config.d_model * config.d_ff
