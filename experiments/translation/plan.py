"""Memory and time of a step: `python -m experiments.translation.plan --preset NAME`.

Compiles the step without text or weights, on as many virtual devices as the mesh has. The options
are those of `train`, and `--machine.accelerator h100 --machine.devices 8`.
"""

import sys
from dataclasses import dataclass

import numpy as np

from experiments.harness import cli, planning
from experiments.harness.planning import Assembled, Machine, PlannedTraining, with_machine
from experiments.translation import train
from experiments.translation.load_run import build_model
from experiments.translation.presets import PRESETS, TranslationConfig
from jaxformer.distributed import Strategy
from jaxformer.text.data import Bucket, PairBatch


@dataclass(frozen=True)
class TranslationPlan(TranslationConfig):
    """A run, and the machine that it would be trained on."""

    machine: Machine = Machine()
    """The machine."""
    alternatives: bool = False
    """Compiles once more for each option that lowers the memory of a step."""


def main(config: TranslationPlan) -> None:
    """Prints the memory and the time that a step on the longest batch needs."""
    planning.plan(config, TRAINING)


def longest(config: TranslationConfig) -> Bucket:
    """The bucket of pairs as long as the model allows, on both sides."""
    data, length = config.data, config.model.max_len
    multiple = data.batch_size_multiple * config.training.grad_accumulation
    rows = max(data.batch_tokens // length // multiple, 1) * multiple
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
    return train.flops_of(config.model, batch_of(config))


def tokens_of(config: TranslationConfig) -> int:
    """Target positions of a step."""
    bucket = longest(config)
    return bucket.batch_size * bucket.target_length


def _assemble(config: TranslationConfig, batch: PairBatch, devices: Strategy) -> Assembled:
    return train.assemble(config, build_model(config, config.model), batch, devices)


TRAINING = PlannedTraining(batch_of, _assemble, flops_of, tokens_of)

if __name__ == "__main__":
    presets = with_machine(PRESETS, TranslationPlan)
    sys.exit(cli.run(lambda: main(cli.parse(presets, description=__doc__))))
