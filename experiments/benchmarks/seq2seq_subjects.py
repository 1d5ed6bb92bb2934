"""Training steps of one translator: ours, the PyTorch reference model's and torch.nn's."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments.benchmarks.environment import load_torch
from experiments.benchmarks.gpt_subjects import (
    AttentionName,
    torch_training_step,
    training_step,
)
from experiments.benchmarks.subprocesses import Subject
from experiments.translation.presets import multi30k_tiny
from jaxformer.config import TransformerConfig, check_at_least
from jaxformer.ops.attention import ATTENTION_FNS
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import EOS, PAD, UNK
from jaxformer.training.optimizer import OptimizerConfig

_WORDS = UNK + 1  # the first id that is no special token


@dataclass(frozen=True)
class Sizes:
    """A pre-norm Transformer with one embedding table, and its batch."""

    num_layers: int = 4
    """Number of encoder layers, and of decoder layers."""
    num_heads: int = 4
    """Number of attention heads."""
    d_model: int = 128
    """Size of a token's vector."""
    d_ff: int = 256
    """Size of the feed-forward networks."""
    vocab_size: int = 10_000
    """Number of token ids."""
    dropout_rate: float = 0.3
    """Dropout of sub-layers and embeddings."""
    label_smoothing: float = 0.1
    """Label smoothing of the loss."""
    rows: int = 256
    """Pairs in a batch."""
    length: int = 16
    """Tokens of each source and of each target, without padding."""

    def __post_init__(self):
        check_at_least(self, 1, "num_layers", "num_heads", "d_ff", "rows", "length")
        check_at_least(self, _WORDS + 1, "vocab_size")
        self.config()

    def config(self) -> TransformerConfig:
        """Returns the configuration of our model and of the PyTorch models."""
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
        """Returns the number of tokens that a step predicts."""
        return self.rows * self.length

    def batches(self) -> Iterator[PairBatch]:
        """Yields batches of random words: eight batches, repeated."""
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
    grad_clip_norm=multi30k_tiny.optimizer.grad_clip_norm,
)
"""Adam as in the preset `multi30k_tiny`, with a constant rate: a tenth of its highest one."""


def ours(sizes: Sizes, attention_fn: AttentionName) -> Subject:
    """Our training step, compiled with the options of `setup_process`."""
    from jaxformer.nn.models import EncoderDecoder
    from jaxformer.training.losses import seq2seq_loss

    model, batches = EncoderDecoder(sizes.config(), ATTENTION_FNS[attention_fn]), sizes.batches()
    first = next(batches)
    inputs = first.source[:2], first.target[:2, :-1]
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=sizes.label_smoothing)
    return training_step(model, inputs, batches, loss, LEARNING)


def torch_reference(sizes: Sizes) -> Subject:
    """The training step of the PyTorch reference model, eager."""
    torch = load_torch()
    from experiments.torch_reference.transformer import Transformer

    torch.manual_seed(0)
    model = Transformer(sizes.config(), sizes.label_smoothing)
    return torch_training_step(model, sizes.batches(), LEARNING)


def torch_nn(sizes: Sizes) -> Subject:
    """The training step of `torch.nn.Transformer` between embeddings and output, eager."""
    torch = load_torch()
    from experiments.benchmarks.torch_translator import Translator

    torch.manual_seed(0)
    model = Translator(sizes.config(), sizes.label_smoothing)
    return torch_training_step(model, sizes.batches(), LEARNING)
