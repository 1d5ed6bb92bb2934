"""Measures one GPU: `python -m experiments.benchmarks.gpu`.

Matrix products, training, beam search and attention, each in a process of its own, one after the
other. A case that fails is named with its reason. Prints a table for each and writes all so far to
RUNS/benchmarks/NAME.json.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp

from experiments.benchmarks import report
from experiments.benchmarks.attention import PEER, Shape, jax_attention, torch_attention
from experiments.benchmarks.decode import (
    DecodeWork,
    ctranslate2_search,
    jax_search,
    write_model,
)
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Case, MakeCase
from experiments.benchmarks.train import GPTWork, TranslationWork, jax_step
from experiments.harness import cli
from experiments.harness.training.training_config import Remat
from experiments.harness.training.utilization import peak_of
from jaxformer import optional_dependencies
from jaxformer.config import (
    TRANSFORMER_BASE,
    TRANSFORMER_BIG,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    Rotary,
    TransformerConfig,
)
from jaxformer.distributed import single
from jaxformer.errors import ConfigError
from jaxformer.training.optimizer import OptimizerConfig

_MEMORY_SHARE = "0.92"  # of the GPU's memory; JAX takes 0.75 by default

TRACK_3 = TransformerConfig(
    vocab_size=50_304,
    d_model=768,
    d_ff=3_072,
    num_heads=6,
    num_decoder_layers=12,
    max_len=1_024,
    norm=NormOptions("rms", placement="pre"),
    feed_forward=FeedForwardOptions("relu"),
    embeddings=EmbeddingOptions(tied="none", scale=False, norm=True),
    output=OutputOptions(bias=True),
    positions=Rotary(),
    initializer="scaled_normal",
    dtype="bfloat16",
)
"""The model of modded-nanogpt's third track (`train_gpt_simple.py`), with these differences.

ReLU is not squared; queries and keys have no norm; rotary positions turn all pairs of a head, not
half of them; logits have no soft cap at 15; the optimizer is AdamW.
"""

GPT_1_3B = replace(
    TRACK_3,
    d_model=2_048,
    d_ff=8_192,
    num_heads=16,
    num_decoder_layers=24,
    norm=NormOptions(placement="pre"),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    output=OutputOptions(bias=False),
    use_bias=False,
)
"""A GPT of 1.31 billion parameters."""

ADAMW = OptimizerConfig(
    schedule="constant",
    learning_rate=1e-4,
    warmup_steps=0,
    b2=0.95,
    eps=1e-8,
    grad_clip_norm=1.0,
    weight_decay=0.1,
)

TABLES = ("matrix_product", "gpt_124m", "gpt_1_3b", "translation", "beam_search", "attention")


@dataclass(frozen=True)
class GpuOptions(TimingConfig):
    """The tables to measure, and how often."""

    name: str = "gpu"
    rounds: int = 5
    round_seconds: float = 0.2
    case_seconds: float = 180.0
    interleaved: bool = False
    only: tuple[str, ...] = ()
    """Tables to measure, such as gpt_124m attention; empty: all of them."""
    small: bool = False
    """Runs the same programs in small sizes, for a test on a CPU."""

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.only if name not in TABLES]
        if unknown:
            raise ConfigError(f"there is no table {unknown[0]!r}: choose among {', '.join(TABLES)}")


def main(options: GpuOptions) -> None:
    """Measures, prints the tables and writes the file."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_SHARE)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "marian"
        write_model(decode_work(options.small), folder)
        makes = tables(options.small, folder)
        chosen = {name: makes[name] for name in options.only or TABLES}
        columns = report.TIMES | report.TOKENS | report.FLOPS | report.MEMORY
        report.run_tables(options, chosen, columns)


def tables(small: bool, folder: Path) -> dict[str, dict[str, MakeCase]]:
    """Returns the cases of each of `TABLES`; `folder` holds the model of the beam search."""
    gpt = GPTWork(
        model=TRACK_3,
        optimizer=ADAMW,
        batch_size=512,
        seq_len=1_024,
        grad_accumulation=8,
        attention_fn="auto",
    )
    pairs = TranslationWork(
        model=TRANSFORMER_BASE, optimizer=ADAMW, batch_size=1_024, seq_len=32, attention_fn="auto"
    )
    rematerialised: dict[Remat, tuple[int, ...]] = {"none": (24, 16, 8), "blocks": (64, 32, 16)}
    big = [
        replace(gpt, model=GPT_1_3B, grad_accumulation=1, remat=remat, batch_size=size)
        for remat, sizes in rematerialised.items()
        for size in sizes
    ]
    base, large = (
        replace(pairs, model=replace(model, dtype="bfloat16"))
        for model in (TRANSFORMER_BASE, TRANSFORMER_BIG)
    )
    plain = replace(gpt, attention_fn="reference")
    steps: dict[str, dict[str, GPTWork | TranslationWork]] = {
        "gpt_124m": {"auto": gpt, "reference": plain},
        "gpt_1_3b": {f"{one.batch_size} sequences, remat {one.remat}": one for one in big},
        "translation": {"base": base, "big": large},
    }
    make = _small_step if small else jax_step
    return {
        "matrix_product": {
            dtype: partial(matrix_product, 64 if small else 8_192, dtype)
            for dtype in ("bfloat16", "float32")
        },
        **{
            title: {name: partial(make, work) for name, work in works.items()}
            for title, works in steps.items()
        },
        "beam_search": {
            "jaxformer": partial(jax_search, decode_work(small), folder, "bfloat16"),
            "CTranslate2": partial(_ctranslate2, decode_work(small), folder),
        },
        "attention": attention_cases(small),
    }


def attention_cases(small: bool) -> dict[str, MakeCase]:
    """Returns causal attention of a fixed number of tokens, in sequences of several lengths."""
    tokens, lengths = (32, (16, 32)) if small else (2**15, tuple(2**n for n in range(10, 16)))
    sizes = (2, 8) if small else (16, 128)
    makes: dict[str, MakeCase] = {}
    for length in lengths:
        shape = Shape(tokens // length, length, *sizes, "bfloat16")
        for name in ("cudnn", "xla", "reference", "blockwise"):
            makes[f"{name}, T = {length:,}"] = partial(jax_attention, name, shape)
        large = partial(jax_attention, "blockwise", shape, 8 if small else 1_024)
        makes[f"blockwise with large blocks, T = {length:,}"] = large
        makes[f"{PEER}, T = {length:,}"] = partial(torch_attention, shape)
    return makes


def decode_work(small: bool) -> DecodeWork:
    """Returns the beam search: 128 texts of the base size."""
    work = DecodeWork(batch_size=128)
    if not small:
        return work
    return replace(work, model=_small(work.model), batch_size=3, source_len=5, target_len=5)


def matrix_product(size: int, dtype: str) -> Case:
    """The product of two random matrices, at JAX's default precision.

    For float32 that is TensorFloat-32 on NVIDIA GPUs since Ampere.
    """
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    with jax.default_matmul_precision("default"):
        multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    peak = peak_of(single(), dtype).total
    metadata = {"device": jax.devices()[0].device_kind, "flops": 2 * size**3, "peak_flops": peak}
    return Case(lambda: multiply(a, b), metadata, jax.block_until_ready)


def _ctranslate2(work: DecodeWork, folder: Path) -> Case:
    """CTranslate2 in float16 on a GPU and in float32 elsewhere."""
    count = optional_dependencies.load("ctranslate2").get_cuda_device_count()
    device, dtype = ("cuda", "float16") if count else ("cpu", "float32")
    return ctranslate2_search(work, folder, device, dtype)


def _small_step(work: GPTWork | TranslationWork) -> Case:
    size = 2 * work.grad_accumulation
    return jax_step(replace(work, model=_small(work.model), batch_size=size, seq_len=16))


def _small(model: TransformerConfig) -> TransformerConfig:
    return replace(
        model,
        vocab_size=41,
        d_model=16,
        d_ff=24,
        num_heads=2,
        num_encoder_layers=min(model.num_encoder_layers, 1),
        num_decoder_layers=min(model.num_decoder_layers, 1),
    )


if __name__ == "__main__":
    cli.start(main, {"default": GpuOptions()}, __doc__)
