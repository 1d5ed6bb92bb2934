"""Losses, the optimizer, and one training step as a pure function."""

from jaxformer.training.losses import Loss, causal_loss, masked_loss, seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import (
    TrainState,
    init_train_state,
    make_train_step,
    with_learning_rate,
)

__all__ = [
    "Loss",
    "OptimizerConfig",
    "TrainState",
    "causal_loss",
    "init_train_state",
    "make_optimizer",
    "make_train_step",
    "masked_loss",
    "seq2seq_loss",
    "with_learning_rate",
]
