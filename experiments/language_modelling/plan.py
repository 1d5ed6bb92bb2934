"""What training needs of a machine: `python -m experiments.language_modelling.plan --preset NAME`.

Compiles the step for shapes alone, on as many virtual devices as the mesh has; needs no text. The
options are those of `train`, and `--machine.accelerator h100 --machine.devices 8`.
"""

import sys
from dataclasses import dataclass

import numpy as np

from experiments import commands, planning
from experiments.language_modelling.borrowed import completed
from experiments.language_modelling.presets import PRESETS, LanguageConfig
from experiments.language_modelling.train import assemble
from experiments.planning import Assembled, Machine, Subject, with_machine
from jaxformer.data import MaskedBatch, StreamBatch
from jaxformer.parallel import Devices


@dataclass(frozen=True)
class LanguagePlan(LanguageConfig):
    """A run, and the machine that it would be trained on.

    `alternatives` compiles once more for each change that makes a step smaller.
    """

    machine: Machine = Machine()
    alternatives: bool = False


def main(config: LanguagePlan) -> None:
    """Prints what a step needs."""
    planning.plan(completed(config), SUBJECT)


def batch_of(config: LanguageConfig) -> StreamBatch | MaskedBatch:
    """A batch of zeros, in the shape that the text of `config` would have."""
    rows, length = config.data.rows, config.data.length
    row = np.arange(rows, dtype=np.int32)
    if config.objective == "masked":
        predicted = _predicted(config)
        at, labels = (np.zeros((rows, predicted), np.int32) for _ in range(2))
        tokens, types = (np.zeros((rows, length), np.int32) for _ in range(2))
        present, valid = np.ones((rows, length), bool), np.ones((rows, predicted), bool)
        return MaskedBatch(tokens, present, types, at, labels, valid, row, np.zeros(rows, np.int32))
    tokens, *facts = (np.zeros((rows, length + 1), np.int32) for _ in range(3))
    segments, positions = facts if config.separate else (None, None)
    return StreamBatch(tokens, np.ones((rows, length), bool), row, segments, positions)


def flops_of(config: LanguageConfig) -> int:
    """FLOPs of a step by the model's equations."""
    rows, length = config.data.rows, config.data.length
    if config.objective == "masked":
        return planning.masked_flops(config.model, rows, length, _predicted(config))
    return planning.causal_flops(config.model, rows, length)


def tokens_of(config: LanguageConfig) -> int:
    """Tokens that a step reads."""
    return config.data.rows * config.data.length


def _predicted(config: LanguageConfig) -> int:
    """As `MaskedStream` has them."""
    return max(1, round(config.data.rate * config.data.length))


def _assemble(
    config: LanguageConfig, batch: StreamBatch | MaskedBatch, devices: Devices
) -> Assembled:
    return assemble(config, config.model, batch, devices)


SUBJECT = Subject(batch_of, _assemble, flops_of, tokens_of)

if __name__ == "__main__":
    presets = with_machine(PRESETS, LanguagePlan)
    sys.exit(commands.run(lambda: main(commands.parse(presets, description=__doc__))))
