"""Sums of a loss over held-out batches."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from flax import linen as nn

from experiments.harness.training.training_config import (
    GatherAt,
)
from jaxformer.distributed import CompiledStep, Strategy, strategy_of
from jaxformer.pretrained import Loaded
from jaxformer.training.losses import Loss


def loss_sums(
    make_loss: Callable[..., Loss], loaded: Loaded, batches: Iterable[Any], **options: Any
) -> dict[str, float]:
    """The results of `batch_sums`, added up over `batches`."""
    sums = {"loss": 0.0, "tokens": 0.0}
    for metrics in batch_sums(make_loss, loaded, batches, **options):
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def batch_sums(
    make_loss: Callable[..., Loss], loaded: Loaded, batches: Iterable[Any], **options: Any
) -> Iterator[dict[str, float]]:
    """The metrics of `Strategy.evaluate` of each of `batches`, on the devices of `loaded.params`.

    The loss is `make_loss(loaded.model, **options)`. Every process gives all rows of a batch, of
    which each device computes its part. A program is compiled once for each shape of batch, also
    when this function is called again.
    """
    config = loaded.config
    devices = strategy_of(loaded.params)
    evaluate = _evaluation(
        devices, make_loss, loaded.model, config.training.gather_at, config.model.dtype, **options
    )
    for batch in batches:
        metrics = evaluate(loaded.params, devices.divide(batch))
        yield {name: float(value) for name, value in metrics.items()}


@lru_cache(maxsize=8)
def _evaluation(
    devices: Strategy,
    make_loss: Callable[..., Loss],
    model: nn.Module,
    gather_at: GatherAt,
    gather_dtype: str,
    **options: Any,
) -> CompiledStep:
    loss = make_loss(model, **options)
    return devices.evaluate(loss, gather_at=gather_at, gather_dtype=gather_dtype)
