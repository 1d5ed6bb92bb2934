"""The step of a language model that `experiments.plan` compiles: its batch and its FLOPs."""

import numpy as np

from experiments.harness.planning import PlannedTraining
from experiments.language_modelling.init_from_pretrained import with_pretrained_sizes
from experiments.language_modelling.objectives import build_model, objective
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import make_init_and_step
from jaxformer.text.data import MaskedBatch, StreamBatch


def batch_of(config: LanguageConfig) -> StreamBatch | MaskedBatch:
    """Returns zeros in the shape of a batch of the text of `config`."""
    rows, length = config.data.batch_size, config.data.seq_len
    row = np.arange(rows, dtype=np.int32)
    if config.objective == "masked":
        # as in `MaskedStream`
        predicted = max(1, round(config.data.mask_prob * config.data.seq_len))
        masked_positions, labels = (np.zeros((rows, predicted), np.int32) for _ in range(2))
        tokens, types = (np.zeros((rows, length), np.int32) for _ in range(2))
        return MaskedBatch(
            tokens=tokens,
            padding_mask=np.ones((rows, length), bool),
            token_type_ids=types,
            masked_positions=masked_positions,
            labels=labels,
            loss_mask=np.ones((rows, predicted), bool),
            example_ids=row,
            next_sentence=np.zeros(rows, np.int32),
        )
    tokens, *facts = (np.zeros((rows, length + 1), np.int32) for _ in range(3))
    segments, positions = facts if config.isolate_documents else (None, None)
    return StreamBatch(tokens, np.ones((rows, length), bool), row, segments, positions)


def flops_of(config: LanguageConfig) -> int:
    """Returns the FLOPs of a step by the model's equations."""
    return objective(config).flops(config.model, batch_of(config))


def tokens_of(config: LanguageConfig) -> int:
    """Returns the number of tokens that a step reads."""
    return config.data.batch_size * config.data.seq_len


TRAINING = PlannedTraining(
    presets=PRESETS,
    prepare=with_pretrained_sizes,
    batch=batch_of,
    build_model=build_model,
    assemble=make_init_and_step,
    flops=flops_of,
    tokens=tokens_of,
)
