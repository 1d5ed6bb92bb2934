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
from experiments.benchmarks.decode import DecodeWork, ctranslate2_search, jax_search, write_model
from experiments.benchmarks.timing import Case, MakeCase, TimingConfig
from experiments.benchmarks.train import GPTWork, TranslationWork, constant, jax_step
from experiments.harness import cli
from experiments.harness.training.training_config import Remat
from experiments.harness.training.utilization import peak_of
from experiments.language_modelling.presets import gpt2_124m, gpt3_xl
from jaxformer import optional_dependencies
from jaxformer.config import TRANSFORMER_BASE, TRANSFORMER_BIG, TransformerConfig
from jaxformer.distributed import single
from jaxformer.errors import ConfigError

_MEMORY_SHARE = "0.92"  # of the GPU's memory; JAX takes 0.75 by default
TABLES = ("matrix_product", "gpt2_124m", "gpt3_xl", "translation", "beam_search", "attention")


@dataclass(frozen=True)
class GpuOptions(TimingConfig):
    """The tables to measure, and how often."""

    name: str = "gpu"
    rounds: int = 5
    repetitions: int = 3
    case_seconds: float = 180.0
    interleaved: bool = False
    only: tuple[str, ...] = ()
    """Tables to measure, such as gpt2_124m attention; empty: all of them."""
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
        report.run_tables(options, {name: makes[name] for name in options.only or TABLES})


def tables(small: bool, folder: Path) -> dict[str, dict[str, MakeCase]]:
    """The cases of each of `TABLES`; `folder` holds the model of the beam search."""
    optimizer = constant(gpt2_124m.optimizer, 1e-4)
    gpt = GPTWork(
        model=gpt2_124m.model,
        optimizer=optimizer,
        batch_size=512,
        seq_len=1_024,
        grad_accumulation=8,
        attention_fn="auto",
    )
    xl = replace(gpt, model=gpt3_xl.model, grad_accumulation=1)
    sizes: dict[Remat, tuple[int, ...]] = {"none": (24, 16, 8), "blocks": (64, 32, 16)}
    pairs = TranslationWork(optimizer=optimizer, batch_size=1_024, seq_len=32, attention_fn="auto")
    steps: dict[str, dict[str, GPTWork | TranslationWork]] = {
        "gpt2_124m": {name: replace(gpt, attention_fn=name) for name in ("auto", "reference")},
        "gpt3_xl": {
            f"{size} sequences, remat {remat}": replace(xl, batch_size=size, remat=remat)
            for remat, batch_sizes in sizes.items()
            for size in batch_sizes
        },
        "translation": {
            name: replace(pairs, model=replace(model, dtype="bfloat16"))
            for name, model in (("base", TRANSFORMER_BASE), ("big", TRANSFORMER_BIG))
        },
    }
    return {
        "matrix_product": {
            dtype: partial(matrix_product, 64 if small else 8_192, dtype)
            for dtype in ("bfloat16", "float32")
        },
        **{
            title: {
                name: partial(jax_step, small_step(work) if small else work)
                for name, work in works.items()
            }
            for title, works in steps.items()
        },
        "beam_search": {
            "jaxformer": partial(jax_search, decode_work(small), folder, "bfloat16"),
            "CTranslate2": partial(_ctranslate2, decode_work(small), folder),
        },
        "attention": attention_cases(small),
    }


def attention_cases(small: bool) -> dict[str, MakeCase]:
    """Causal attention of a fixed number of tokens, in sequences of several lengths."""
    tokens, lengths = (32, (16, 32)) if small else (2**15, tuple(2**n for n in range(10, 16)))
    sizes = (2, 8) if small else (16, 128)
    makes: dict[str, MakeCase] = {}
    for length in lengths:
        shape = Shape(tokens // length, length, *sizes, "bfloat16")
        for name in ("cudnn", "reference", "blockwise"):
            makes[f"{name}, T = {length:,}"] = partial(jax_attention, name, shape)
        large = partial(jax_attention, "blockwise", shape, 8 if small else 1_024)
        makes[f"blockwise with large blocks, T = {length:,}"] = large
        makes[f"{PEER}, T = {length:,}"] = partial(torch_attention, shape)
    return makes


def decode_work(small: bool) -> DecodeWork:
    """The beam search: 128 texts of the base size."""
    work = DecodeWork(batch_size=128)
    if not small:
        return work
    return replace(work, model=_small(work.model), batch_size=3, source_len=5, target_len=5)


def small_step(work: GPTWork | TranslationWork) -> GPTWork | TranslationWork:
    """The same step of a small model and batch."""
    size = 2 * work.grad_accumulation
    return replace(work, model=_small(work.model), batch_size=size, seq_len=16)


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
