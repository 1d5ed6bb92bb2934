"""Settings with which a run learns little or nothing."""

from collections.abc import Iterator

from experiments.harness.training.experiment_config import ExperimentConfig
from jaxformer.config import is_import_name

_LARGE_STEP = 1.0
"""A learning rate from which on Adam moves each weight by about 1 in each step."""
_LARGE_DECAY = 0.1
"""A share of each weight that weight decay may remove in a step."""


def doubts(config: ExperimentConfig) -> Iterator[str]:
    """A sentence about each setting of `config` that keeps the run from learning.

    An optimizer of the user's own may read all settings in another way, and gives no doubt.
    """
    optimizer = config.optimizer
    if config.training.lora_rank and config.training.lora_alpha == 0:
        yield (
            "lora_alpha=0 multiplies the adapters by 0, so nothing is learned: give "
            "--training.lora_alpha above 0"
        )
    if is_import_name(optimizer.name):
        return
    if optimizer.learning_rate == 0:
        yield (
            "learning_rate=0 changes no weight, so nothing is learned: give "
            "--optimizer.learning_rate above 0"
        )
        return
    if is_import_name(optimizer.schedule):
        return
    rate, warmup, total = optimizer.learning_rate, optimizer.warmup_steps, optimizer.total_steps
    if warmup > total:
        yield (
            f"the warm-up of {warmup:,} steps is longer than the run of {total:,}: the learning "
            f"rate ends at {total / warmup:.2g} of {rate:g}; give fewer --optimizer.warmup_steps"
        )
        rate *= total / warmup
    if rate >= _LARGE_STEP:
        yield (
            f"learning_rate={rate:g} moves each weight by about {rate:g} in a step: a usual one is "
            "between 0.00001 and 0.01"
        )
    if rate * optimizer.weight_decay >= _LARGE_DECAY:
        yield (
            f"weight_decay={optimizer.weight_decay:g} takes {rate * optimizer.weight_decay:.0%} of "
            f"each weight of a matrix in a step with the learning rate {rate:g}: a usual one is "
            "between 0 and 0.1"
        )
