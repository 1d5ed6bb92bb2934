"""What the models share: norms, feed-forwards, a loss, and how they refuse a config."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.data import PairBatch
from jaxformer.tokenizers import PAD

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class PositionWiseFeedForward(nn.Module):
    """Two linear maps with an activation between (section 3.3)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.d_model, config.d_ff, config.use_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, config.use_bias)
        self.dropout = nn.Dropout(config.activation_dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D] through [B, T, F]."""
        return self.down(self.dropout(self.activation(self.up(x))))


def translation_loss(
    model: nn.Module, batch: PairBatch, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of nats of the labels of `batch` that are no padding, and their number.

    `model(source, target, source_valid)` gives logits [B, T, V].
    """
    source, target = torch.tensor(batch.source), torch.tensor(batch.target).long()
    labels = target[:, 1:].flatten()
    logits = model(source, target[:, :-1], source != PAD).flatten(0, 1)
    nats = F.cross_entropy(
        logits, labels, ignore_index=PAD, reduction="sum", label_smoothing=smoothing
    )
    return nats, (labels != PAD).sum()


def norm(config: TransformerConfig) -> nn.LayerNorm:
    """A LayerNorm over d_model, with a bias where the config's maps have one."""
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.use_bias)


def check(config: TransformerConfig, fixed: Mapping[str, Any], preset: str) -> None:
    """Raises `ConfigError` for a field that is not as `fixed`; `preset` names one that is."""
    for name, needed in fixed.items():
        value = getattr(config, name)
        if value != needed:
            raise ConfigError(
                f"{name}={value!r}, but the twin has {name}={needed!r} only: "
                f"give that, or a preset that has it, such as {preset}"
            )
