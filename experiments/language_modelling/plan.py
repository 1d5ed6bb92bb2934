"""Memory and time of a step: `python -m experiments.language_modelling.plan --preset NAME`.

Compiles the step without text, weights or devices. The options are those of `train`, and --target
h100x8 or v5e:4x4. --compiler cpu estimates; tpu and cuda are the targets' own compilers.
"""

from dataclasses import dataclass

import numpy as np

from experiments.harness import cli, planning
from experiments.harness.planning import PlannedTraining, PlanOptions, with_options
from experiments.language_modelling.init_from_pretrained import with_pretrained_sizes
from experiments.language_modelling.objectives import build_model, objective
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import make_init_and_step
from jaxformer.text.data import MaskedBatch, StreamBatch


@dataclass(frozen=True)
class LanguagePlan(PlanOptions, LanguageConfig):
    """A run, and the devices that it is planned for."""


def main(config: LanguagePlan) -> None:
    """Prints the memory and the time that a step needs."""
    planning.plan(with_pretrained_sizes(config), TRAINING)


def batch_of(config: LanguageConfig) -> StreamBatch | MaskedBatch:
    """A batch of zeros, in the shape that the text of `config` would have."""
    rows, length = config.data.batch_size, config.data.seq_len
    row = np.arange(rows, dtype=np.int32)
    if config.objective == "masked":
        predicted = _predicted(config)
        at, labels = (np.zeros((rows, predicted), np.int32) for _ in range(2))
        tokens, types = (np.zeros((rows, length), np.int32) for _ in range(2))
        return MaskedBatch(
            tokens=tokens,
            padding_mask=np.ones((rows, length), bool),
            token_type_ids=types,
            masked_positions=at,
            labels=labels,
            loss_mask=np.ones((rows, predicted), bool),
            example_ids=row,
            next_sentence=np.zeros(rows, np.int32),
        )
    tokens, *facts = (np.zeros((rows, length + 1), np.int32) for _ in range(3))
    segments, positions = facts if config.isolate_documents else (None, None)
    return StreamBatch(tokens, np.ones((rows, length), bool), row, segments, positions)


def flops_of(config: LanguageConfig) -> int:
    """FLOPs of a step by the model's equations."""
    return objective(config).flops(config.model, batch_of(config))


def tokens_of(config: LanguageConfig) -> int:
    """Tokens that a step reads."""
    return config.data.batch_size * config.data.seq_len


def _predicted(config: LanguageConfig) -> int:
    """Predicted tokens of a sequence, as in `MaskedStream`."""
    return max(1, round(config.data.mask_prob * config.data.seq_len))


TRAINING = PlannedTraining(
    batch=batch_of,
    build_model=build_model,
    assemble=make_init_and_step,
    flops=flops_of,
    tokens=tokens_of,
)

if __name__ == "__main__":
    cli.start(main, with_options(PRESETS, LanguagePlan), __doc__)
