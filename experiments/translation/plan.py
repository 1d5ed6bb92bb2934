"""Memory and time of a step: `python -m experiments.translation.plan --preset NAME`.

Compiles the step without text, weights or devices. The options are those of `train`, and --target
h100x8 or v5e:4x4. --compiler cpu estimates; tpu and cuda are the targets' own compilers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.harness import cli, planning
from experiments.harness.planning import PlannedTraining, PlanOptions, with_options
from experiments.translation import train
from experiments.translation.load_run import build_model
from experiments.translation.prepare import with_parent
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.teacher import with_logits
from jaxformer.text.data import Bucket, PairBatch


@dataclass(frozen=True)
class TranslationPlan(PlanOptions, TranslationConfig):
    """A run, and the devices that it is planned for."""


def main(config: TranslationPlan) -> None:
    """Prints the memory and the time that a step on the longest batch needs."""
    planning.plan(with_parent(config), TRAINING)


def longest(config: TranslationConfig) -> Bucket:
    """The bucket of pairs as long as the model allows, on both sides."""
    data, length = config.data, config.model.max_len
    multiple = data.batch_size_multiple * config.training.grad_accumulation
    rows = max(data.batch_tokens // length // multiple, 1) * multiple
    return Bucket(length, length, rows)


def batch_of(config: TranslationConfig) -> Any:
    """A batch of zeros, in the shape of `longest`, with the logits of a teacher if there is one."""
    source, target, rows = longest(config)
    batch = PairBatch(
        np.zeros((rows, source), np.int32),
        np.zeros((rows, target + 1), np.int32),
        np.arange(rows, dtype=np.int32),
    )
    if not config.training.teacher:
        return batch
    return with_logits(batch, np.zeros((rows, target, config.model.vocab_size), np.float32))


def flops_of(config: TranslationConfig) -> int:
    """FLOPs of a step by the model's equations."""
    return train.cost(config, batch_of(config)).flops


def tokens_of(config: TranslationConfig) -> int:
    """Target positions of a step."""
    bucket = longest(config)
    return bucket.batch_size * bucket.target_length


TRAINING = PlannedTraining(
    batch=batch_of,
    build_model=build_model,
    assemble=train.make_init_and_step,
    flops=flops_of,
    tokens=tokens_of,
)

if __name__ == "__main__":
    cli.start(main, with_options(PRESETS, TranslationPlan), __doc__)
