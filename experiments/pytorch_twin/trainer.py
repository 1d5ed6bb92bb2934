"""Learning in PyTorch: an object that holds the model, its optimizer and its schedule."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from jaxformer.config import ConfigError
from jaxformer.data import PairBatch, StreamBatch
from jaxformer.optimizer import OptimizerConfig

Batch = PairBatch | StreamBatch


class Trainer:
    """Updates `model` in place, by the clipped mean gradient of a batch and AdamW.

    `model.loss(batch)` is (the sum of nats, the number of tokens), as tensors. Matrices and tables
    decay, biases and norm scales do not. Raises `ConfigError` for another rule than Adam.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        if config.name != "adam":
            raise ConfigError(f"name={config.name!r} is no optimizer of the twin: it has adam only")
        self.model = model
        self.clip_norm = config.clip_norm or math.inf
        self.skipped = self.skipped_in_a_row = 0
        self.optimizer = torch.optim.AdamW(
            _groups(model, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.b1, config.b2),
            eps=config.eps,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: rate_share(config, done + 1)
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """Makes one update; the metrics are those of `jaxformer.training.make_train_step`.

        Likewise it skips an update whose loss or gradient is not finite.
        """
        self.model.train()
        self.optimizer.zero_grad()
        nats, tokens = self.model.loss(batch)
        (nats / tokens).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if nats.isfinite() and norm.isfinite():
            self.optimizer.step()
            self.schedule.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        return {
            "loss": nats.item(),
            "tokens": tokens.item(),
            "grad_norm": norm.item(),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """The nats of all `batches`, summed, and their number, without dropout."""
        self.model.eval()
        sums = 0.0, 0
        for batch in batches:
            nats, tokens = self.model.loss(batch)
            sums = sums[0] + nats.item(), sums[1] + tokens.item()
        return sums


def rate_share(config: OptimizerConfig, number: int) -> float:
    """The learning rate of update `number` (1, 2, ..) as a share of the highest."""
    warmup = max(config.warmup_steps, 1)
    if number < warmup:
        return number / warmup
    if config.schedule == "inverse_square_root":
        return math.sqrt(warmup / number)
    if config.schedule == "constant":
        return 1.0
    way = min((number - warmup) / (config.total_steps - warmup), 1.0)
    low = config.final_fraction
    return low + (1.0 - low) * (1.0 + math.cos(math.pi * way)) / 2.0


def _groups(model: nn.Module, weight_decay: float) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
