"""A block, attention function, loss, schedule, metric, logger and so on of a user, by name."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments.examples.custom_modules import DistanceBias
from jaxformer.nn.blocks import Block
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.attention import reference
from jaxformer.text.data import StreamBatch
from jaxformer.text.tokenizers import PAD, SPECIAL_TOKENS, train_characters
from jaxformer.training.losses import causal_loss, seq2seq_loss

NOT_CALLABLE = 3


class OwnBlock(Block):
    """Has a parameter that the library's block has not."""

    def setup(self):
        super().setup()
        self.gain = self.param("gain", nn.initializers.constant(1.5), (1, 1, 1))

    def after_attention(self, *inputs):
        return super().after_attention(*inputs) * self.gain


@dataclass(frozen=True)
class OwnPositions(DistanceBias):
    """Reaches less far than the example's."""

    max_distance: int = 5


"""Has a parameter that none of the library's schemes has."""


class OwnTranslator(EncoderDecoder):
    """Has logits that are twice those of the library's model."""

    def lm_head(self, hidden):
        return 2.0 * super().lm_head(hidden)


def cosine_attention(q, k, v, mask, *, scale, bias=None, dropout=None):
    """Attention by the angle between query and key alone."""
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return reference(q, k, v, mask, scale=3.0, bias=bias, dropout=dropout)


def doubled_loss(model, **options):
    """Twice the loss of a causal language model, and the sum of the ids to predict."""
    loss = causal_loss(model, **options)

    def doubled(params, batch, rng):
        nats, tokens = loss(params, batch, rng)
        ids = jnp.sum(jnp.where(batch.loss_mask, batch.tokens[:, 1:], 0))
        return 2.0 * nats, tokens, {"ids": ids}

    return doubled


def doubled_seq2seq_loss(model, **options):
    """Twice the loss of a translation, and the sum of the ids to predict."""
    loss = seq2seq_loss(model, **options)

    def doubled(params, batch, rng):
        nats, tokens = loss(params, batch, rng)
        ids = jnp.sum(jnp.where(batch.target[:, 1:] == PAD, 0, batch.target[:, 1:]))
        return 2.0 * nats, tokens, {"ids": ids}

    return doubled


def halving(config):
    """An eighth of the learning rate, halved with every update."""
    return optax.exponential_decay(config.learning_rate / 8, 1, 0.5)


def plain_descent(config, schedule):
    """The gradient times the learning rate, without clipping."""
    return optax.sgd(schedule)


def lengths(evaluation):
    """The number of ids that the model may predict, and what is left of the loss at twice of it."""
    return {"size": evaluation.loaded.tokenizer.vocab_size, "half": evaluation.scores["loss"] / 2}


def words(evaluation):
    """The mean number of words of a translation."""
    return {
        "words": sum(len(x.split()) for x in evaluation.hypotheses) / len(evaluation.text.source)
    }


def parts(evaluation):
    """The parts of a batch that the configuration of an evaluation says."""
    return {"parts": evaluation.loaded.config.training.parts}


class Counting:
    """Batches of rows that count modulo 11."""

    steps_per_epoch = 5
    fingerprint = "counting"

    def batch(self, step, rows):
        numbers = rows(3)
        ids = (np.arange(20) + 7 * step + numbers[:, None]) % 11
        mask = np.ones((len(numbers), 19), bool)
        return StreamBatch(ids.astype(np.int32), mask, numbers.astype(np.int32))


def counting(config, prepared):
    """`Counting`, for the batch size and vocabulary that it is made for."""
    assert config.data.batch_size == 3 and prepared.tokenizer.vocab_size > 11
    return Counting()


def texts():
    """Documents of two letters."""
    return [f"{chr(65 + i % 26)} {chr(65 + i % 25)}" for i in range(997)]


def other_texts():
    """The documents of `texts`, backwards."""
    return [text[::-1] for text in texts()]


def pairs():
    """Documents of `texts` as targets."""
    return [(f"{text} {text} {chr(65 + i % 17)}", text) for i, text in enumerate(texts())]


def upper(texts, vocab_size):
    """A tokenizer of capital letters, which needs to see no text."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ "
    return train_characters([letters], special_tokens=SPECIAL_TOKENS)


class OwnLogger:
    """Writes steps to a file of its own in the run's folder, and fails at each evaluation."""

    def __init__(self, folder):
        self.file = (folder / "own.log").open("w")

    def log(self, step, metrics):
        if "validation_loss" in metrics:
            raise ValueError("no room")
        self.file.write(f"{step} {metrics['loss']}\n")

    def close(self):
        self.file.write("closed\n")
        self.file.close()


def rigid(model, *, pad, label_smoothing, loss_chunk):
    """The loss of a translation, which takes no further options."""
    return seq2seq_loss(model, pad=pad, label_smoothing=label_smoothing, loss_chunk=loss_chunk)
