"""Training steps of GPTs and Transformers on one device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.benchmarks.gpu.clock import pace
from jaxformer.config import TransformerConfig
from jaxformer.optimizer import OptimizerConfig

LEARNING = OptimizerConfig(
    schedule="constant",
    learning_rate=1e-4,
    warmup_steps=0,
    b2=0.95,
    eps=1e-8,
    clip_norm=1.0,
    weight_decay=0.1,
)
"""AdamW, its moments in float32, at a low rate that stays."""

_PAD = 0


@dataclass(frozen=True)
class Training:
    """A step of `rows` of `length` tokens in `accumulation` parts; of a pair, `length` a side.

    `remat` computes the insides of the blocks a second time in the backward pass. `kernel` is
    "auto" or a name in `jaxformer.kernels.KERNELS`. It is repeated for about `seconds`.
    """

    model: TransformerConfig
    rows: int
    length: int
    accumulation: int = 1
    remat: bool = False
    kernel: str = "auto"
    seconds: float = 8.0

    @property
    def tokens(self) -> int:
        """How many tokens a step predicts."""
        return self.rows * self.length


Train = Callable[[Training], Iterator[tuple[str, Any]]]


def train_gpt(training: Training) -> Iterator[tuple[str, Any]]:
    """A causal language model on random tokens, the same batch again and again.

    "tokens_per_second", and "teraflops" by `planning.causal_flops`, which counts a causal query's
    own keys alone and no recomputation.
    """
    from experiments.planning import causal_flops
    from jaxformer.data import StreamBatch
    from jaxformer.losses import causal_loss
    from jaxformer.models import DecoderOnly

    model, kernel = _model(DecoderOnly, training)
    rng = np.random.default_rng(0)
    shape = training.rows, training.length + 1
    tokens = rng.integers(0, training.model.vocab_size, shape, np.int32)
    valid = np.ones((training.rows, training.length), bool)
    batch = StreamBatch(tokens, valid, np.arange(training.rows, dtype=np.int32), None, None)
    flops = causal_flops(training.model, training.rows, training.length)
    yield "parameters", _parameters(model, tokens[:1, :8])
    steps = _steps(model, (tokens[:1, :8],), batch, causal_loss(model), training)
    for name, value in steps:
        yield name, value
        if name == "ms":
            yield "tokens_per_second", training.tokens / value * 1e3
            yield "teraflops", flops / value / 1e9
    yield "attention", _taken(kernel)


def train_translator(training: Training) -> Iterator[tuple[str, Any]]:
    """An encoder-decoder on random pairs without padding, with label smoothing 0.1.

    "target_tokens_per_second" counts what is predicted, as fairseq's "wps" does,
    "tokens_per_second" source and target; "teraflops" by `planning.seq2seq_flops`.
    """
    from experiments.planning import seq2seq_flops
    from jaxformer.data import PairBatch
    from jaxformer.losses import seq2seq_loss
    from jaxformer.models import EncoderDecoder

    model, kernel = _model(EncoderDecoder, training)
    rng = np.random.default_rng(0)
    sides = [
        rng.integers(_PAD + 1, training.model.vocab_size, (training.rows, length), np.int32)
        for length in (training.length, training.length + 1)
    ]
    batch = PairBatch(*sides, np.arange(training.rows, dtype=np.int32))
    flops = seq2seq_flops(training.model, training.rows, training.length, training.length)
    inputs = sides[0][:1, :8], sides[1][:1, :8]
    yield "parameters", _parameters(model, *inputs)
    loss = seq2seq_loss(model, pad=_PAD, smoothing=0.1)
    for name, value in _steps(model, inputs, batch, loss, training):
        yield name, value
        if name == "ms":
            yield "target_tokens_per_second", training.tokens / value * 1e3
            yield "tokens_per_second", 2 * training.tokens / value * 1e3
            yield "teraflops", flops / value / 1e9
    yield "attention", _taken(kernel)


def _model(kind: Callable[..., Any], training: Training) -> tuple[Any, Any]:
    """The model, and the kernel that it computes attention with."""
    from flax import linen as nn

    from jaxformer import kernels
    from jaxformer.blocks import Block

    kernel = kernels.Auto() if training.kernel == "auto" else kernels.get(training.kernel)
    return kind(training.model, kernel, nn.remat(Block) if training.remat else Block), kernel


def _taken(kernel: Any) -> list[str]:
    """The kernels that attention was computed with."""
    from jaxformer.kernels import Auto

    if isinstance(kernel, Auto):
        return sorted({choice.kernel for choice in kernel.taken.values()})
    return [kernel.__name__]


def _parameters(model: Any, *inputs: Any) -> int:
    import jax

    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _steps(
    model: Any, inputs: tuple[Any, ...], batch: Any, loss: Any, training: Training
) -> Iterator[tuple[str, Any]]:
    """What compiling and repeating the training step tells; the state is donated."""
    import jax

    from jaxformer import runtime
    from jaxformer.optimizer import make_optimizer
    from jaxformer.training import init_state, make_train_step

    yield "tuned", str(runtime.tune())
    yield "device", jax.devices()[0].device_kind
    optimizer = make_optimizer(LEARNING)

    def make_state() -> Any:
        params = model.init(jax.random.key(0), *inputs)["params"]
        return init_state(params, optimizer, jax.random.key(1))

    step = make_train_step(loss, optimizer, accumulation=training.accumulation)
    state, batch = jax.jit(make_state)(), jax.device_put(batch)
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    yield "compile_seconds", time.perf_counter() - begin
    yield "temporary_bytes", compiled.memory_analysis().temp_size_in_bytes
    losses = []

    def start() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        losses.append(metrics["loss"] / metrics["tokens"])
        return metrics

    found = pace(start, jax.block_until_ready, seconds=training.seconds)
    yield from found.facts().items()
    yield "loss_before_and_after", [float(losses[0]), float(losses[-1])]
