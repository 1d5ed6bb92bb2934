"""Training steps of GPTs and Transformers on one device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.benchmarks.gpu.timing import measure
from jaxformer.config import TransformerConfig
from jaxformer.training.optimizer import OptimizerConfig

LEARNING = OptimizerConfig(
    schedule="constant",
    learning_rate=1e-4,
    warmup_steps=0,
    b2=0.95,
    eps=1e-8,
    grad_clip_norm=1.0,
    weight_decay=0.1,
)
"""AdamW with float32 moments and a low constant learning rate."""

_PAD = 0


@dataclass(frozen=True)
class Training:
    """A training step on `rows` of `length` tokens, in `grad_accumulation` parts.

    For pairs, `length` is that of each side. `remat` recomputes each block in the backward pass.
    `attention_fn` is "auto" or a name in `jaxformer.ops.attention.ATTENTION_FNS`. The step is
    repeated for about `seconds`.
    """

    model: TransformerConfig
    rows: int
    length: int
    grad_accumulation: int = 1
    remat: bool = False
    attention_fn: str = "auto"
    seconds: float = 8.0

    @property
    def tokens(self) -> int:
        """Returns the number of tokens that a step predicts."""
        return self.rows * self.length


Train = Callable[[Training], Iterator[tuple[str, Any]]]


def train_gpt(training: Training) -> Iterator[tuple[str, Any]]:
    """Trains a causal language model on one batch of random tokens.

    "teraflops" is by `planning.causal_flops`: only the keys that a query may see, no recomputation.
    """
    from experiments.harness.planning import causal_flops
    from jaxformer.nn.models import DecoderOnly
    from jaxformer.text.data import StreamBatch
    from jaxformer.training.losses import causal_loss

    model, attention_fn = _model(DecoderOnly, training)
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
    yield "attention", _names(attention_fn)


def train_translator(training: Training) -> Iterator[tuple[str, Any]]:
    """Trains an encoder-decoder on one batch of random pairs, with label smoothing 0.1.

    "target_tokens_per_second" counts predicted tokens, as fairseq's "wps" does;
    "tokens_per_second" counts source and target; "teraflops" is by `planning.seq2seq_flops`.
    """
    from experiments.harness.planning import seq2seq_flops
    from jaxformer.nn.models import EncoderDecoder
    from jaxformer.text.data import PairBatch
    from jaxformer.training.losses import seq2seq_loss

    model, attention_fn = _model(EncoderDecoder, training)
    rng = np.random.default_rng(0)
    sides = [
        rng.integers(_PAD + 1, training.model.vocab_size, (training.rows, length), np.int32)
        for length in (training.length, training.length + 1)
    ]
    batch = PairBatch(sides[0], sides[1], np.arange(training.rows, dtype=np.int32))
    flops = seq2seq_flops(training.model, training.rows, training.length, training.length)
    inputs = sides[0][:1, :8], sides[1][:1, :8]
    yield "parameters", _parameters(model, *inputs)
    loss = seq2seq_loss(model, pad=_PAD, label_smoothing=0.1)
    for name, value in _steps(model, inputs, batch, loss, training):
        yield name, value
        if name == "ms":
            yield "target_tokens_per_second", training.tokens / value * 1e3
            yield "tokens_per_second", 2 * training.tokens / value * 1e3
            yield "teraflops", flops / value / 1e9
    yield "attention", _names(attention_fn)


def _model(kind: Callable[..., Any], training: Training) -> tuple[Any, Any]:
    """Returns the model and its attention function."""
    from flax import linen as nn

    from jaxformer.nn.blocks import Block
    from jaxformer.ops.attention import ATTENTION_FNS, AutoAttention

    name, block = training.attention_fn, nn.remat(Block) if training.remat else Block
    attention_fn = AutoAttention() if name == "auto" else ATTENTION_FNS[name]
    return kind(training.model, attention_fn, block), attention_fn


def _names(attention_fn: Any) -> list[str]:
    """Returns the names of the attention functions that were used."""
    from jaxformer.ops.attention import AutoAttention

    if isinstance(attention_fn, AutoAttention):
        return sorted({selection.name for selection in attention_fn.selections})
    return [attention_fn.__name__]


def _parameters(model: Any, *inputs: Any) -> int:
    import jax

    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _steps(
    model: Any, inputs: tuple[Any, ...], batch: Any, loss: Any, training: Training
) -> Iterator[tuple[str, Any]]:
    """Compiles and repeats the training step; yields what it measures."""
    import jax

    from jaxformer.runtime import setup
    from jaxformer.training.optimizer import make_optimizer
    from jaxformer.training.train_step import init_train_state, make_train_step

    yield "tuned", str(setup.setup_process())
    yield "device", jax.devices()[0].device_kind
    optimizer = make_optimizer(LEARNING)

    def make_state() -> Any:
        params = model.init(jax.random.key(0), *inputs)["params"]
        return init_train_state(params, optimizer, jax.random.key(1))

    step = make_train_step(loss, optimizer, grad_accumulation=training.grad_accumulation)
    state, batch = jax.jit(make_state)(), jax.device_put(batch)
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    yield "compile_seconds", time.perf_counter() - begin
    memory = compiled.memory_analysis()
    yield "temporary_bytes", memory and memory.temp_size_in_bytes
    losses = []

    def start() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        losses.append(metrics["loss"] / metrics["tokens"])
        return metrics

    found = measure(start, jax.block_until_ready, seconds=training.seconds)
    yield from found.facts().items()
    yield "loss_before_and_after", [float(losses[0]), float(losses[-1])]
