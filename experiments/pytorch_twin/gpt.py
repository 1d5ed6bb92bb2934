"""The decoder-only model once more, in PyTorch: objects that hold their weights.

The same function as `jaxformer.models.DecoderOnly` of an equal config, and the model of nanoGPT,
with 804,096 parameters in its CPU settings.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from experiments.pytorch_twin.parts import PositionWiseFeedForward, check, norm
from jaxformer.config import TransformerConfig
from jaxformer.data import StreamBatch

_FIXED = {
    "positions": "learned",
    "norm": "layer",
    "norm_placement": "pre",
    "gated": False,
    "tied_embeddings": "output",
    "output_bias": False,
    "scale_embeddings": False,
    "normalize_embeddings": False,
    "initializer": "scaled_normal",
    "dtype": "float32",
    "num_kv_heads": None,
    "head_dim": None,
    "value_head_dim": None,
}


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each token to itself and those before it."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout_rate = config.attention_dropout_rate
        self.query_key_value = nn.Linear(config.d_model, 3 * config.d_model, config.use_bias)
        self.out = nn.Linear(config.d_model, config.d_model, config.use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, N, H]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, N, T, H] each
        rate = self.dropout_rate if self.training else 0.0
        gathered = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.out(gathered.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

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
    """A causal language model, started from torch's own random state.

    Raises `ConfigError` for a config that asks for more than nanoGPT's model has.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        check(config, _FIXED, "shakespeare_char_cpu")
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_decoder_layers))
        self.final_norm = norm(config)
        self._start(0.02 / math.sqrt(2 * config.num_decoder_layers))

    def _start(self, residual_deviation: float) -> None:
        """Matrices of deviation 0.02, smaller where they lead into the residual stream."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.normal_(block.attention.out.weight, std=residual_deviation)
            nn.init.normal_(block.feed_forward.down.weight, std=residual_deviation)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `tokens` [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.embedding.weight)

    def loss(self, batch: StreamBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of nats of the labels of `batch` that are valid, and their number."""
        tokens, valid = torch.tensor(batch.tokens), torch.tensor(batch.valid)
        logits, labels = self(tokens[:, :-1]), tokens[:, 1:].long()
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (nats * valid.flatten()).sum(), valid.sum()
