"""Losses, the optimizer, and one training step as a pure function."""

from jaxformer.training.losses import (
    Loss,
    causal_loss,
    classification_loss,
    masked_and_next_sentence_loss,
    masked_loss,
    seq2seq_loss,
    span_loss,
)
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from jaxformer.training.parameters import Params
from jaxformer.training.train_step import (
    TrainState,
    init_train_state,
    make_eval_step,
    make_train_step,
    raise_if_diverged,
)

__all__ = [
    "Loss",
    "OptimizerConfig",
    "Params",
    "TrainState",
    "causal_loss",
    "classification_loss",
    "init_train_state",
    "make_eval_step",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "masked_and_next_sentence_loss",
    "masked_loss",
    "raise_if_diverged",
    "seq2seq_loss",
    "span_loss",
]
