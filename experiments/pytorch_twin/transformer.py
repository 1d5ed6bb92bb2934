"""The encoder-decoder Transformer once more, in PyTorch: objects that hold their weights.

The same function as `jaxformer.models.EncoderDecoder` of an equal config (Vaswani et al. 2017).
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from experiments.pytorch_twin.parts import PositionWiseFeedForward, check, norm, translation_loss
from jaxformer.config import TransformerConfig
from jaxformer.data import PairBatch

_FIXED = {
    "positions": "sinusoidal",
    "sinusoidal_layout": "interleaved",
    "norm": "layer",
    "gated": False,
    "tied_embeddings": "all",
    "output_bias": False,
    "scale_embeddings": True,
    "normalize_embeddings": False,
    "initializer": "xavier",
    "dtype": "float32",
    "num_kv_heads": None,
    "head_dim": None,
    "value_head_dim": None,
}


class ScaledDotProductAttention(nn.Module):
    """softmax(Q K^T / sqrt(d_k)) V, written out (section 3.2.1)."""

    def __init__(self, size: int, dropout_rate: float):
        super().__init__()
        self.size = size
        self.dropout = nn.Dropout(dropout_rate)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What [B, N, T, H] gathers from [B, N, S, H], and the weights [B, N, T, S].

        `allowed`, which spreads to [B, N, T, S], is False where a query may not attend.
        """
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.size)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -1e9)
        weights = scores.softmax(dim=-1)
        return self.dropout(weights) @ value, weights


class MultiHeadAttention(nn.Module):
    """Attention in several heads at once, between four linear maps (section 3.2.2)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.query = self._projection(config)
        self.key = self._projection(config)
        self.value = self._projection(config)
        self.out = self._projection(config)
        self.attention = ScaledDotProductAttention(config.key_size, config.attention_dropout_rate)

    @staticmethod
    def _projection(config: TransformerConfig) -> nn.Linear:
        return nn.Linear(config.d_model, config.d_model, config.use_bias)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What `x` [B, T, D] gathers from `memory` [B, S, D], as [B, T, D]."""
        query = self._heads(self.query(x))
        key, value = self._heads(self.key(memory)), self._heads(self.value(memory))
        gathered, _ = self.attention(query, key, value, allowed)
        return self.out(gathered.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, N, T, H]


class Residual(nn.Module):
    """What stands around each sub-layer: dropout, the way past it, and the norm."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = norm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.before = config.norm_placement == "pre"

    def forward(
        self, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """norm(x + layer(x)), or x + layer(norm(x)) where the norm comes before."""
        if self.before:
            return x + self.dropout(layer(self.norm(x)))
        return self.norm(x + self.dropout(layer(x)))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward (section 3.1)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention = MultiHeadAttention(config)
        self.attention_residual = Residual(config)
        self.feed_forward = PositionWiseFeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """[B, S, D] to [B, S, D]."""
        x = self.attention_residual(x, lambda h: self.attention(h, h, allowed))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoded source, and feed-forward (section 3.1)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention = MultiHeadAttention(config)
        self.attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config)
        self.cross_attention_residual = Residual(config)
        self.feed_forward = PositionWiseFeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        allowed: torch.Tensor,
        memory_allowed: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D], with `memory` [B, S, D]."""
        x = self.attention_residual(x, lambda h: self.attention(h, h, allowed))
        x = self.cross_attention_residual(
            x, lambda h: self.cross_attention(h, memory, memory_allowed)
        )
        return self.feed_forward_residual(x, self.feed_forward)


class PositionalEncoding(nn.Module):
    """Adds sin and cos of the position, and drops out of the sum (sections 3.5 and 5.4).

    Raises `ValueError` in `forward` for more than `max_len` positions.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        size = config.d_model
        # In float64: a float32 angle of 500 is off by 3e-5.
        even = torch.arange(0, size, 2, dtype=torch.float64)
        rate = torch.exp(even * (-math.log(10_000.0) / size))
        angle = torch.arange(config.max_len)[:, None] * rate
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :size].float()
        # No weight, and made again from the config: it stays out of the state dict.
        self.register_buffer("table", table, persistent=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [B, T, D] with row t of the table added to each [:, t]."""
        if x.shape[1] > len(self.table):
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens was given, but the positions end at max_len="
                f"{len(self.table)}: shorten it, or build the model with a greater max_len"
            )
        return self.dropout(x + self.table[: x.shape[1]])


class TransformerEncoder(nn.Module):
    """The layers of the encoder, and a norm after pre-norm ones."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.final_norm = _final_norm(config)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """[B, S, D] to [B, S, D]."""
        for layer in self.layers:
            x = layer(x, allowed)
        return self.final_norm(x)


class TransformerDecoder(nn.Module):
    """The layers of the decoder, and a norm after pre-norm ones."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.final_norm = _final_norm(config)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, memory_allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D], each position from those before it and `memory` [B, S, D]."""
        length = x.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, memory, past, memory_allowed)
        return self.final_norm(x)


class Transformer(nn.Module):
    """Encoder and decoder with one table of embeddings, started from torch's own random state.

    `smoothing` is that of the labels in `loss`. Raises `ConfigError` for a config that asks for
    more than the Transformer of the paper has.
    """

    def __init__(self, config: TransformerConfig, smoothing: float = 0.0):
        super().__init__()
        check(config, _FIXED, "multi30k_tiny")
        self.smoothing = smoothing
        self.scale = math.sqrt(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionalEncoding(config)
        self.encoder = TransformerEncoder(config)
        self.decoder = TransformerDecoder(config)
        self._start()

    def _start(self) -> None:
        """Glorot-uniform matrices, a table of deviation 1/sqrt(D), biases of zero."""
        nn.init.normal_(self.embedding.weight, std=1.0 / self.scale)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, source_valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `target` [B, T], given `source` [B, S].

        `source_valid` [B, S] is False at padding.
        """
        allowed = None if source_valid is None else source_valid[:, None, None, :]
        memory = self.encoder(self._embed(source), allowed)
        x = self.decoder(self._embed(target), memory, allowed)
        return F.linear(x, self.embedding.weight)

    def loss(self, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of nats of the labels of `batch` that are no padding, and their number."""
        return translation_loss(self, batch, self.smoothing)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.positions(self.embedding(tokens) * self.scale)


def _final_norm(config: TransformerConfig) -> nn.Module:
    return norm(config) if config.norm_placement == "pre" else nn.Identity()
