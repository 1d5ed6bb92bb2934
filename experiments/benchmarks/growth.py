"""Cost as a model grows: `python -m experiments.benchmarks.growth`.

Layers, vocabulary, rows and devices of a training step of GPT-2's shape made narrow; source and
target length of a step of decoding. Each size is a process of its own. Prints a table for each and
writes runs/benchmarks.
"""

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from experiments import commands
from experiments.benchmarks import report
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Make, Subject, compare
from experiments.benchmarks.environment import environment
from jaxformer import runtime
from jaxformer.config import ConfigError, TransformerConfig, check_least, gpt2, transformer_base
from jaxformer.data import StreamBatch
from jaxformer.losses import causal_loss
from jaxformer.models import DecoderOnly, EncoderDecoder
from jaxformer.optimizer import OptimizerConfig, make_optimizer
from jaxformer.parallel import one_device, replicate
from jaxformer.training import TrainState, init_state


@dataclass(frozen=True)
class Training:
    """A training step of GPT-2's model with other sizes, on as many simulated devices."""

    layers: int = 12
    d_model: int = 96
    heads: int = 12
    vocabulary: int = 1_024
    rows: int = 4
    length: int = 64
    devices: int = 1

    def __post_init__(self):
        names = ("layers", "d_model", "heads", "vocabulary", "rows", "length", "devices")
        check_least(self, 1, *names)

    def config(self) -> TransformerConfig:
        """The model."""
        return replace(
            gpt2,
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
    """A step of decoding with a translator: `rows` sources, up to `target` tokens to write."""

    layers: int = 2
    d_model: int = 256
    heads: int = 4
    vocabulary: int = 1_024
    rows: int = 4
    source: int = 16
    target: int = 32

    def __post_init__(self):
        names = ("layers", "d_model", "heads", "vocabulary", "rows", "source", "target")
        check_least(self, 1, *names)

    def config(self) -> TransformerConfig:
        """The model: the paper's, with other sizes."""
        return replace(
            transformer_base,
            num_encoder_layers=self.layers,
            num_decoder_layers=self.layers,
            d_model=self.d_model,
            d_ff=4 * self.d_model,
            num_heads=self.heads,
            vocab_size=self.vocabulary,
            dropout_rate=0.0,
        )

    def attention(self) -> int:
        """FLOPs a token of scores and weighted values, over the source and all target places."""
        return self.layers * 4 * self.d_model * (self.source + self.target)


@dataclass(frozen=True)
class GrowthOptions:
    """Which sizes grow, from what, and how long each is looked at."""

    name: str = "growth"
    training: Training = field(default_factory=Training)
    decoding: Decoding = field(default_factory=Decoding)
    layers: tuple[int, ...] = (4, 8, 12, 16, 32)
    vocabularies: tuple[int, ...] = (1_024, 8_192, 50_257)
    rows: tuple[int, ...] = (1, 4, 16)
    devices: tuple[int, ...] = (1, 2, 4)
    sources: tuple[int, ...] = (16, 64, 256)
    targets: tuple[int, ...] = (16, 64, 256)
    rounds: int = 5
    steps: int = 3
    warm_up: int = 2
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "steps", "warm_up")
        for devices in self.devices:
            if self.training.rows % devices:
                raise ConfigError(
                    f"devices={devices} do not divide training.rows={self.training.rows}: give "
                    "divisors"
                )


def main(options: GrowthOptions) -> None:
    """Measures, prints the tables and writes the file."""
    where = environment()
    effort = {"rounds": options.rounds, "count": options.steps, "warm_up": options.warm_up}
    found = {
        title: compare(makes, peers=(), **effort) for title, makes in subjects(options).items()
    }
    report.publish(options, where, found, COLUMNS)


def subjects(options: GrowthOptions) -> dict[str, dict[str, Make]]:
    """What is measured in each table, from the smallest to the largest."""
    step, word = options.training, options.decoding
    return {
        "a training step by layers": _grown(training, step, "layers", options.layers),
        "by vocabulary": _grown(training, step, "vocabulary", options.vocabularies),
        "by rows": _grown(training, step, "rows", options.rows),
        "by simulated devices": _grown(training, step, "devices", options.devices),
        "a step of decoding by source length": _grown(decoding, word, "source", options.sources),
        "by target length": _grown(decoding, word, "target", options.targets),
    }


def _grown(
    make: Callable[[Any], Subject], start: Any, name: str, sizes: Iterable[int]
) -> dict[str, Make]:
    return {f"{name} {size:,}": partial(make, replace(start, **{name: size})) for size in sizes}


def training(work: Training) -> Subject:
    """A training step, and what compiling it took: at first, and from the cache on disk."""
    jax.config.update("jax_num_cpu_devices", work.devices)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    model, optimizer = DecoderOnly(work.config()), make_optimizer(OptimizerConfig())
    tokens = np.zeros((work.rows, work.length + 1), np.int32)
    valid = np.ones((work.rows, work.length), bool)

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), tokens[:1, :-1])["params"]
        return init_state(params, optimizer, jax.random.key(1))

    with TemporaryDirectory() as programs:
        tuning = runtime.tune(Path(programs))
        devices = one_device(options=tuning.options) if work.devices == 1 else replicate()
        batch = devices.place(StreamBatch(tokens, valid, np.arange(work.rows), None, None))
        state, step = devices.init(make_state), devices.step(causal_loss(model), optimizer)
        facts: dict[str, float | int] = {}
        for name in ("compiled in, s", "from the cache, s"):
            jax.clear_caches()
            begin = time.perf_counter()
            compiled = step.lower(state, batch).compile()
            facts[name] = round(time.perf_counter() - begin, 2)
    instructions = re.findall(r"^ +(?:ROOT )?%\S+ = ", compiled.as_text(), re.MULTILINE)
    facts["instructions"] = len(instructions)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, batch)
        return float(metrics["loss"])

    return Subject(run, facts)


def decoding(work: Decoding) -> Subject:
    """A step of cached decoding for every row, and its FLOPs a token by XLA's count."""
    model = EncoderDecoder(work.config())
    source, tokens = (np.zeros((work.rows, size), np.int32) for size in (work.source, 1))
    params = jax.jit(model.init)(jax.random.key(0), source[:1], tokens[:1])["params"]
    start = partial(model.apply, length=work.target, method="start")
    cache = jax.jit(start)({"params": params}, source)
    extend = jax.jit(partial(model.apply, method="extend"))
    given = {"params": params}, tokens[:, None], cache
    flops = extend.lower(*given).cost_analysis()["flops"] / work.rows
    facts = {"FLOPs a token": int(flops), "of attention": work.attention()}
    return Subject(lambda: jax.block_until_ready(extend(*given)), facts)


def _fact(name: str) -> report.Column:
    def column(summary: Summary, facts: Mapping[str, Any]) -> str:
        value = facts.get(name, "-")
        return f"{value:,}" if isinstance(value, int) else str(value)

    return column


_FACTS = ("compiled in, s", "from the cache, s", "instructions", "FLOPs a token", "of attention")
_TIMES = itertools.islice(report.TIMES.items(), 3)  # no peer, and processors say little here
COLUMNS = {**dict(_TIMES), **{name: _fact(name) for name in _FACTS}}

if __name__ == "__main__":
    options = {"default": GrowthOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
