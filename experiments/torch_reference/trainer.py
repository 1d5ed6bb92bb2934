"""Training in PyTorch: an object that holds the model, its optimizer and its schedule."""

import math
from typing import Any

import torch
from torch import nn

from jaxformer.errors import ConfigError
from jaxformer.text.data import PairBatch, StreamBatch
from jaxformer.training.optimizer import OptimizerConfig, make_schedule

Batch = PairBatch | StreamBatch


class Trainer:
    """Updates `model` in place with AdamW and the clipped mean gradient of a batch.

    `model.loss(batch)` returns (summed loss in nats, number of tokens) as tensors. Weight decay
    applies to matrices and tables, not to biases and norm scales. Raises `ConfigError` for an
    optimizer other than Adam.
    """

    def __init__(self, model: Any, config: OptimizerConfig):
        if config.name != "adam":
            raise ConfigError(
                f"name={config.name!r} is not supported by the PyTorch reference: give name='adam'"
            )
        self.model = model
        self.grad_clip_norm = config.grad_clip_norm or math.inf
        self.skipped = self.consecutive_skips = 0
        self.optimizer = torch.optim.AdamW(
            _groups(model, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.b1, config.b2),
            eps=config.eps,
            fused=True,
        )
        rate: Any = make_schedule(config)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: float(rate(done)) / config.learning_rate
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """Makes one update; returns the metrics that our training step returns.

        An update whose loss or gradient is not finite is skipped.
        """
        self.model.train()
        self.optimizer.zero_grad()
        nats, tokens = self.model.loss(batch)
        (nats / tokens).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip_norm)
        if nats.isfinite() and norm.isfinite():
            self.optimizer.step()
            self.schedule.step()
            self.consecutive_skips = 0
        else:
            self.skipped += 1
            self.consecutive_skips += 1
        return {
            "loss": nats.item(),
            "tokens": tokens.item(),
            "grad_norm": norm.item(),
            "skipped": self.skipped,
            "consecutive_skips": self.consecutive_skips,
        }


def _groups(model: nn.Module, weight_decay: float) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
