"""A training step of one encoder-decoder: ours, that of the PyTorch twin, and torch.nn's."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import runs
from experiments.benchmarks import pytorch
from experiments.benchmarks.children import Subject
from experiments.translation.presets import multi30k_tiny
from jaxformer.config import TransformerConfig, check_least
from jaxformer.data import PairBatch
from jaxformer.optimizer import OptimizerConfig
from jaxformer.tokenizers import EOS, PAD, UNK

_WORDS = UNK + 1  # the first id that is no special token


@dataclass(frozen=True)
class Sizes:
    """A pre-norm Transformer with one table of embeddings, and the batch that it learns.

    `rows` pairs of `length` tokens on either side, none of them padding; `smoothing` is that of
    the labels.
    """

    num_layers: int = 4
    num_heads: int = 4
    d_model: int = 128
    d_ff: int = 256
    vocab_size: int = 10_000
    dropout_rate: float = 0.3
    smoothing: float = 0.1
    rows: int = 256
    length: int = 16

    def __post_init__(self):
        check_least(self, 1, "num_layers", "num_heads", "d_ff", "rows", "length")
        check_least(self, _WORDS + 1, "vocab_size")
        self.config()

    def config(self) -> TransformerConfig:
        """The model as ours and the twin's are made of it."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_heads=self.num_heads,
            num_encoder_layers=self.num_layers,
            num_decoder_layers=self.num_layers,
            max_len=128,
            norm_placement="pre",
            dropout_rate=self.dropout_rate,
        )

    @property
    def tokens(self) -> int:
        """How many tokens a step predicts."""
        return self.rows * self.length

    def batches(self) -> Iterator[PairBatch]:
        """Random words; the same few batches again and again."""
        rng = np.random.default_rng(0)
        row = np.arange(self.rows, dtype=np.int32)

        def draw(length: int) -> np.ndarray:
            words = rng.integers(_WORDS, self.vocab_size, (self.rows, length), np.int32)
            words[:, -1] = EOS
            return words

        drawn = [PairBatch(draw(self.length), draw(self.length + 1), row) for _ in range(8)]
        return itertools.cycle(drawn)


LEARNING = OptimizerConfig(
    schedule="constant",
    learning_rate=multi30k_tiny.optimizer.learning_rate / 10,
    warmup_steps=0,
    b2=multi30k_tiny.optimizer.b2,
    eps=multi30k_tiny.optimizer.eps,
    clip_norm=multi30k_tiny.optimizer.clip_norm,
)
"""Adam as in the preset `multi30k_tiny`, at a tenth of its highest rate, which stays."""


def ours(sizes: Sizes, attention: str) -> Subject:
    """Our step: compiled with the options of `runtime.tune`, its state donated."""
    import jax

    from jaxformer import kernels, runtime
    from jaxformer.losses import seq2seq_loss
    from jaxformer.models import EncoderDecoder
    from jaxformer.optimizer import make_optimizer
    from jaxformer.training import init_state, make_train_step

    tuning = runtime.tune()
    batches, model = sizes.batches(), EncoderDecoder(sizes.config(), kernels.get(attention))
    optimizer, first = make_optimizer(LEARNING), next(batches)
    inputs = first.source[:2], first.target[:2, :-1]
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    state = init_state(params, optimizer, jax.random.key(1))
    step = make_train_step(seq2seq_loss(model, pad=PAD, smoothing=sizes.smoothing), optimizer)
    compiled = jax.jit(step, donate_argnums=0, compiler_options=tuning.options)

    def run() -> float:
        nonlocal state
        state, metrics = compiled(state, next(batches))
        return float(metrics["loss"]) / float(metrics["tokens"])

    device = jax.devices()[0].device_kind
    return Subject(run, {"parameters": runs.count(params), "device": device, "tuned": str(tuning)})


def twin(sizes: Sizes) -> Subject:
    """The step of our PyTorch twin, eager."""
    torch = pytorch.load()
    from experiments.pytorch_twin.transformer import Transformer

    torch.manual_seed(0)
    return _trained(Transformer(sizes.config(), sizes.smoothing), sizes)


def torch_nn(sizes: Sizes) -> Subject:
    """The step of `torch.nn.Transformer` between embeddings and output, eager."""
    torch = pytorch.load()
    from experiments.benchmarks.torch_translator import Translator

    torch.manual_seed(0)
    return _trained(Translator(sizes.config(), sizes.smoothing), sizes)


def _trained(model: Any, sizes: Sizes) -> Subject:
    """The twin's training step, with PyTorch's fused Adam, on a model that has a `loss`."""
    from experiments.pytorch_twin.trainer import Trainer

    trainer, batches = Trainer(model, LEARNING), sizes.batches()

    def run() -> float:
        metrics = trainer.step(next(batches))
        return metrics["loss"] / metrics["tokens"]

    return Subject(run, pytorch.facts(model))
