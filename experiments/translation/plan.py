"""What training needs of a machine: `python -m experiments.translation.plan --preset NAME`.

Compiles the step for shapes alone, on as many virtual devices as the mesh has; needs no text. The
options are those of `train`, and `--machine.accelerator h100 --machine.devices 8`.
"""

import sys
from dataclasses import dataclass

import numpy as np

from experiments import commands, planning
from experiments.planning import Assembled, Machine, Subject, with_machine
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import assemble
from jaxformer.data import Bucket, PairBatch
from jaxformer.parallel import Devices


@dataclass(frozen=True)
class TranslationPlan(TranslationConfig):
    """A run, and the machine that it would be trained on.

    `alternatives` compiles once more for each change that makes a step smaller.
    """

    machine: Machine = Machine()
    alternatives: bool = False


def main(config: TranslationPlan) -> None:
    """Prints what a step needs of the longest batch that text could make."""
    planning.plan(config, SUBJECT)


def longest(config: TranslationConfig) -> Bucket:
    """The bucket of pairs as long as the model allows, on both sides."""
    data, length = config.data, config.model.max_len
    multiple = data.rows_multiple * config.training.accumulation
    rows = max(data.tokens // length // multiple, 1) * multiple
    return Bucket(length, length, rows)


def batch_of(config: TranslationConfig) -> PairBatch:
    """A batch of zeros, in the shape of `longest`."""
    source, target, rows = longest(config)
    return PairBatch(
        np.zeros((rows, source), np.int32),
        np.zeros((rows, target + 1), np.int32),
        np.arange(rows, dtype=np.int32),
    )


def flops_of(config: TranslationConfig) -> int:
    """FLOPs of a step by the model's equations."""
    source, target, rows = longest(config)
    return planning.seq2seq_flops(config.model, rows, source, target)


def tokens_of(config: TranslationConfig) -> int:
    """Target positions of a step."""
    bucket = longest(config)
    return bucket.rows * bucket.target_length


def _assemble(config: TranslationConfig, batch: PairBatch, devices: Devices) -> Assembled:
    return assemble(config, config.model, batch, devices)


SUBJECT = Subject(batch_of, _assemble, flops_of, tokens_of)

if __name__ == "__main__":
    presets = with_machine(PRESETS, TranslationPlan)
    sys.exit(commands.run(lambda: main(commands.parse(presets, description=__doc__))))
