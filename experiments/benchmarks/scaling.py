"""Times a model as it grows: `python -m experiments.benchmarks.scaling`.

A training step by layers, vocabulary, batch size, devices and the length of sentences (also of
LSTMs with attention); a decoding step by source and target length. Prints a table for each and
writes RUNS/benchmarks/NAME.json.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import report
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Case, MakeCase
from experiments.benchmarks.train_cases import (
    GPTWork,
    TranslationWork,
    assemble,
    jax_step,
    random_batches,
)
from experiments.harness import cli
from experiments.translation.presets import multi30k_tiny
from jaxformer.config import (
    GPT2,
    TRANSFORMER_BASE,
    TransformerConfig,
    check_at_least,
    with_fields,
)
from jaxformer.distributed import replicated, single
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.runtime.setup import setup_process
from jaxformer.training.optimizer import OptimizerConfig


def _small(model: TransformerConfig, d_model: int, num_heads: int) -> TransformerConfig:
    sizes = {"d_model": d_model, "d_ff": 4 * d_model, "num_heads": num_heads, "vocab_size": 1_024}
    return with_fields(model, sizes | {"dropout_rate": 0.0, "attention.dropout_rate": 0.0})


@dataclass(frozen=True, kw_only=True)
class TrainingWork(GPTWork):
    """A training step of GPT-2's model with other sizes, on simulated devices."""

    model: TransformerConfig = replace(_small(GPT2, 96, 12), max_len=64)
    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: int = 4
    devices: int = 1
    """Number of simulated devices; it divides the batch size."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "devices")
        if self.batch_size % self.devices:
            raise ConfigError(
                f"devices={self.devices} do not divide batch_size={self.batch_size}: give divisors"
            )


@dataclass(frozen=True)
class DecodingWork:
    """A cached decoding step of a translator."""

    model: TransformerConfig = replace(
        _small(TRANSFORMER_BASE, 256, 4), num_encoder_layers=2, num_decoder_layers=2
    )
    """Sizes of the model."""
    batch_size: int = 4
    """Number of source texts."""
    source_len: int = 16
    """Tokens of each source."""
    target_len: int = 32
    """Length of the cache: the most tokens of a translation."""

    def __post_init__(self):
        check_at_least(self, 1, "batch_size", "source_len", "target_len")

    def attention_flops(self) -> int:
        """Returns the FLOPs of attention for one token, over source and target."""
        layers, width = self.model.num_decoder_layers, self.model.d_model
        return layers * 4 * width * (self.source_len + self.target_len)


_TRANSLATING = TranslationWork(
    model=replace(multi30k_tiny.model, max_len=256), batch_size=16, seq_len=256
)
_RECURRENT = "experiments.examples.recurrent:Recurrent"


@dataclass(frozen=True)
class ScalingOptions(TimingConfig):
    """Which sizes are varied, and the sizes that stay."""

    name: str = "scaling"
    rounds: int = 5
    repetitions: int = 3
    warm_up: int = 2
    training: TrainingWork = TrainingWork()
    """The training step, of which one size is varied at a time."""
    decoding: DecodingWork = DecodingWork()
    """The decoding step, of which one size is varied at a time."""
    translating: TranslationWork = _TRANSLATING
    """The training step of a translator, whose tokens are cut into sentences of each length."""
    layers: tuple[int, ...] = (4, 8, 12, 16, 32)
    """Numbers of layers of the training step."""
    vocab_sizes: tuple[int, ...] = (1_024, 8_192, 50_257)
    """Vocabulary sizes of the training step."""
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    """Batch sizes of the training step."""
    devices: tuple[int, ...] = (1, 2, 4)
    """Numbers of simulated devices of the training step; each divides its batch size."""
    sentence_lens: tuple[int, ...] = (16, 64, 256)
    """Lengths of the sentences of the translator's training step."""
    source_lens: tuple[int, ...] = (16, 64, 256)
    """Source lengths of the decoding step."""
    target_lens: tuple[int, ...] = (16, 64, 256)
    """Target lengths of the decoding step."""

    def __post_init__(self):
        super().__post_init__()
        tables(self)


def main(options: ScalingOptions) -> None:
    """Measures, prints the tables and writes the file."""
    report.run_tables(options, tables(options), COLUMNS)


def tables(options: ScalingOptions) -> dict[str, dict[str, MakeCase]]:
    """Returns the cases of each table, from the smallest to the largest."""
    train = partial(_varied, train_case, options.training)
    decode = partial(_varied, decode_case, options.decoding)
    return {
        "a training step by layers": train("model.num_decoder_layers", options.layers),
        "by vocabulary": train("model.vocab_size", options.vocab_sizes),
        "by batch size": train("batch_size", options.batch_sizes),
        "by simulated devices": train("devices", options.devices),
        "of a translator by the length of sentences": _translators(options),
        "a step of decoding by source length": decode("source_len", options.source_lens),
        "by target length": decode("target_len", options.target_lens),
    }


def _varied(
    make: Callable[[Any], Case], work: Any, field: str, sizes: Iterable[int]
) -> dict[str, MakeCase]:
    name = field.removeprefix("model.")

    def changed(size: int) -> Any:
        if name == field:
            return replace(work, **{name: size})
        return replace(work, model=replace(work.model, **{name: size}))

    return {f"{name} {size:,}": partial(make, changed(size)) for size in sizes}


def _translators(options: ScalingOptions) -> dict[str, MakeCase]:
    """Steps of a Transformer and of LSTMs of about as many parameters, with the same tokens."""
    transformer = options.translating
    layers = replace(transformer.model, num_encoder_layers=2, num_decoder_layers=1)
    recurrent = replace(transformer, model=layers, own_model=_RECURRENT)
    return {
        f"{name}, length {size:,}": partial(
            jax_step, replace(work, batch_size=max(1, work.tokens // size), seq_len=size)
        )
        for name, work in (("Transformer", transformer), ("LSTMs", recurrent))
        for size in options.sentence_lens
    }


def train_case(work: TrainingWork) -> Case:
    """A training step; reports the compilation time, without and with the cache on disk."""
    jax.config.update("jax_num_cpu_devices", work.devices)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with TemporaryDirectory() as cache:
        options = setup_process(Path(cache)).compiler_options
        devices = single(compiler_options=options) if work.devices == 1 else replicated()
        make_state, step, _ = assemble(work, devices)
        state, batch = devices.init(make_state), devices.shard_batch(next(random_batches(work)))
        metadata: dict[str, Any] = {}
        for name in ("compiled in, s", "from the cache, s"):
            jax.clear_caches()
            begin = time.perf_counter()
            compiled = step.lower(state, batch).compile()
            metadata[name] = round(time.perf_counter() - begin, 2)
    program = compiled.as_text() or ""
    instructions = re.findall(r"^ +(?:ROOT )?%\S+ = ", program, re.MULTILINE)
    metadata["instructions"] = len(instructions)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        return float(metrics["loss"])

    return Case(run, metadata)


def decode_case(work: DecodingWork) -> Case:
    """A cached decoding step; reports its FLOPs for a token by XLA's count."""
    model = EncoderDecoder(work.model)
    source, tokens = (np.zeros((work.batch_size, size), np.int32) for size in (work.source_len, 1))
    params = jax.jit(model.init)(jax.random.key(0), source[:1], tokens[:1])["params"]
    init_cache = partial(model.apply, max_length=work.target_len, method="init_cache")
    cache = jax.jit(init_cache)({"params": params}, source)
    step = jax.jit(partial(model.apply, method="decode_step"))
    given = {"params": params}, tokens[:, None], cache
    cost = step.lower(*given).cost_analysis() or {}
    flops = int(cost["flops"] / work.batch_size)
    metadata = {"FLOPs a token": flops, "of attention": work.attention_flops()}
    return Case(lambda: step(*given), metadata, jax.block_until_ready)


_METADATA = ("compiled in, s", "from the cache, s", "instructions", "FLOPs a token", "of attention")
COLUMNS = report.TIMES | report.TOKENS | {name: report.value(name) for name in _METADATA}

if __name__ == "__main__":
    cli.start(main, {"default": ScalingOptions()}, __doc__)
