"""The decoder-only model in PyTorch: nanoGPT's, with 804,096 parameters in its CPU settings.

The same function as `jaxformer.nn.models.DecoderOnly` of the same configuration.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from experiments.torch_reference.transformer import PositionWiseFeedForward, check, norm
from jaxformer.config import Learned, TransformerConfig
from jaxformer.text.data import StreamBatch

_CHOICES = {
    "positions": Learned(),
    "norm.placement": "pre",
    "embeddings.tied": "output",
    "embeddings.scale": False,
    "initializer": "scaled_normal",
}


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout_rate = config.attention.dropout_rate
        self.query_key_value = nn.Linear(config.d_model, 3 * config.d_model, config.use_bias)
        self.out = nn.Linear(config.d_model, config.d_model, config.use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, N, H]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, N, T, H] each
        rate = self.dropout_rate if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention_norm = norm(config)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = norm(config)
        self.feed_forward = PositionWiseFeedForward(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A causal language model, initialised from torch's random state.

    Raises `ConfigError` for a config that nanoGPT's model does not cover.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        check(config, _CHOICES, "shakespeare_char_cpu")
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_decoder_layers))
        self.final_norm = norm(config)
        self._initialize(0.02 / math.sqrt(2 * config.num_decoder_layers))

    def _initialize(self, residual_std: float) -> None:
        """Standard deviation 0.02; `residual_std` for the last matrix of each sub-layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in cast(Iterable[Block], self.blocks):
            nn.init.normal_(block.attention.out.weight, std=residual_std)
            nn.init.normal_(block.feed_forward.down.weight, std=residual_std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `tokens` [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.embedding.weight)

    def loss(self, batch: StreamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of the valid labels of `batch` in nats, and their number."""
        tokens, valid = torch.tensor(batch.tokens), torch.tensor(batch.loss_mask)
        logits, labels = self(tokens[:, :-1]), tokens[:, 1:].long()
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (nats * valid.flatten()).sum(), valid.sum()
