"""Times a model as it grows: `python -m experiments.benchmarks.scaling`.

A training step by layers, vocabulary, batch size and devices; a decoding step by source and target
length. Prints a table for each and writes RUNS/benchmarks/NAME.json.
"""

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import report
from experiments.benchmarks.environment import environment
from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.subprocesses import Make, Subject, compare
from experiments.harness import cli
from jaxformer.config import GPT2, TRANSFORMER_BASE, TransformerConfig, check_at_least
from jaxformer.distributed import replicated, single
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.runtime import setup
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import TrainState, init_train_state


@dataclass(frozen=True)
class Training:
    """A training step of GPT-2's model with other sizes, on simulated devices."""

    layers: int = 12
    """Number of layers."""
    d_model: int = 96
    """Size of a token's vector."""
    heads: int = 12
    """Number of attention heads."""
    vocabulary: int = 1_024
    """Number of token ids."""
    rows: int = 4
    """Batch size."""
    length: int = 64
    """Tokens in a row."""
    devices: int = 1
    """Number of simulated devices."""

    def __post_init__(self):
        check_at_least(self, 1, *(field.name for field in fields(self)))

    def config(self) -> TransformerConfig:
        """Returns the configuration of the model."""
        return replace(
            GPT2,
            num_decoder_layers=self.layers,
            d_model=self.d_model,
            d_ff=4 * self.d_model,
            num_heads=self.heads,
            vocab_size=self.vocabulary,
            max_len=self.length,
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
        )


@dataclass(frozen=True)
class Decoding:
    """A cached decoding step of a translator."""

    layers: int = 2
    """Number of encoder layers, and of decoder layers."""
    d_model: int = 256
    """Size of a token's vector."""
    heads: int = 4
    """Number of attention heads."""
    vocabulary: int = 1_024
    """Number of token ids."""
    rows: int = 4
    """Number of source texts."""
    source: int = 16
    """Tokens in each source."""
    target: int = 32
    """Length of the cache: the most tokens of a translation."""

    def __post_init__(self):
        check_at_least(self, 1, *(field.name for field in fields(self)))

    def config(self) -> TransformerConfig:
        """Returns the configuration: the paper's, with other sizes."""
        return replace(
            TRANSFORMER_BASE,
            num_encoder_layers=self.layers,
            num_decoder_layers=self.layers,
            d_model=self.d_model,
            d_ff=4 * self.d_model,
            num_heads=self.heads,
            vocab_size=self.vocabulary,
            dropout_rate=0.0,
        )

    def attention(self) -> int:
        """Returns the FLOPs of attention for one token, over source and target."""
        return self.layers * 4 * self.d_model * (self.source + self.target)


@dataclass(frozen=True)
class ScalingOptions(TimingConfig):
    """Which sizes are varied, and the sizes that stay."""

    name: str = "scaling"
    rounds: int = 5
    repetitions: int = 3
    warm_up: int = 2
    training: Training = field(default_factory=Training)
    """The training step, of which one size is varied at a time."""
    decoding: Decoding = field(default_factory=Decoding)
    """The decoding step, of which one size is varied at a time."""
    layers: tuple[int, ...] = (4, 8, 12, 16, 32)
    """Numbers of layers of the training step."""
    vocabularies: tuple[int, ...] = (1_024, 8_192, 50_257)
    """Vocabulary sizes of the training step."""
    rows: tuple[int, ...] = (1, 4, 16)
    """Batch sizes of the training step."""
    devices: tuple[int, ...] = (1, 2, 4)
    """Numbers of simulated devices of the training step; each divides its batch size."""
    sources: tuple[int, ...] = (16, 64, 256)
    """Source lengths of the decoding step."""
    targets: tuple[int, ...] = (16, 64, 256)
    """Target lengths of the decoding step."""

    def __post_init__(self):
        super().__post_init__()
        for devices in self.devices:
            if self.training.rows % devices:
                raise ConfigError(
                    f"devices={devices} do not divide training.rows={self.training.rows}: give "
                    "divisors"
                )


def main(options: ScalingOptions) -> None:
    """Measures, prints the tables and writes the file."""
    where = environment()
    found = {title: compare(makes, options, peers=()) for title, makes in subjects(options).items()}
    report.publish(options, where, found, COLUMNS)


def subjects(options: ScalingOptions) -> dict[str, dict[str, Make]]:
    """Returns the subjects of each table, from the smallest to the largest."""
    train, decode = options.training, options.decoding
    return {
        "a training step by layers": _varied(training, train, "layers", options.layers),
        "by vocabulary": _varied(training, train, "vocabulary", options.vocabularies),
        "by rows": _varied(training, train, "rows", options.rows),
        "by simulated devices": _varied(training, train, "devices", options.devices),
        "a step of decoding by source length": _varied(decoding, decode, "source", options.sources),
        "by target length": _varied(decoding, decode, "target", options.targets),
    }


def _varied(
    make: Callable[[Any], Subject], start: Any, name: str, sizes: Iterable[int]
) -> dict[str, Make]:
    return {f"{name} {size:,}": partial(make, replace(start, **{name: size})) for size in sizes}


def training(work: Training) -> Subject:
    """A training step; reports the compilation time, without and with the cache on disk."""
    jax.config.update("jax_num_cpu_devices", work.devices)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    model, optimizer = DecoderOnly(work.config()), make_optimizer(OptimizerConfig())
    tokens = np.zeros((work.rows, work.length + 1), np.int32)
    valid = np.ones((work.rows, work.length), bool)

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), tokens[:1, :-1])["params"]
        return init_train_state(params, optimizer, jax.random.key(1))

    with TemporaryDirectory() as cache:
        options = setup.setup_process(Path(cache)).compiler_options
        devices = single(compiler_options=options) if work.devices == 1 else replicated()
        batch = devices.shard_batch(StreamBatch(tokens, valid, np.arange(work.rows), None, None))
        state, step = devices.init(make_state), devices.step(causal_loss(model), optimizer)
        facts: dict[str, float | int] = {}
        for name in ("compiled in, s", "from the cache, s"):
            jax.clear_caches()
            begin = time.perf_counter()
            compiled = step.lower(state, batch).compile()
            facts[name] = round(time.perf_counter() - begin, 2)
    program = compiled.as_text() or ""
    instructions = re.findall(r"^ +(?:ROOT )?%\S+ = ", program, re.MULTILINE)
    facts["instructions"] = len(instructions)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        return float(metrics["loss"])

    return Subject(run, facts)


def decoding(work: Decoding) -> Subject:
    """A cached decoding step; reports its FLOPs a token by XLA's count."""
    model = EncoderDecoder(work.config())
    source, tokens = (np.zeros((work.rows, size), np.int32) for size in (work.source, 1))
    params = jax.jit(model.init)(jax.random.key(0), source[:1], tokens[:1])["params"]
    start = partial(model.apply, max_length=work.target, method="init_cache")
    cache = jax.jit(start)({"params": params}, source)
    extend = jax.jit(partial(model.apply, method="decode_step"))
    given = {"params": params}, tokens[:, None], cache
    cost = extend.lower(*given).cost_analysis() or {}
    flops = cost["flops"] / work.rows
    facts = {"FLOPs a token": int(flops), "of attention": work.attention()}
    return Subject(lambda: jax.block_until_ready(extend(*given)), facts)


def _fact(name: str) -> report.Column:
    def column(summary: Summary, facts: Mapping[str, Any]) -> str:
        value = facts.get(name, "-")
        return f"{value:,}" if isinstance(value, int) else str(value)

    return column


_FACTS = ("compiled in, s", "from the cache, s", "instructions", "FLOPs a token", "of attention")
_TIMES = itertools.islice(report.TIMES.items(), 3)  # without processors and peers
COLUMNS = {**dict(_TIMES), **{name: _fact(name) for name in _FACTS}}

if __name__ == "__main__":
    options = {"default": ScalingOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
