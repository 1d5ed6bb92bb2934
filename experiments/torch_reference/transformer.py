"""The encoder-decoder Transformer in PyTorch (Vaswani et al. 2017).

The same function as `jaxformer.nn.models.EncoderDecoder` of the same configuration.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from jaxformer.config import TransformerConfig, dotted_fields
from jaxformer.errors import ConfigError
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD

_FREE = (
    "vocab_size",
    "d_model",
    "d_ff",
    "num_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "max_len",
    "dropout_rate",
    "attention.dropout_rate",
    "feed_forward.dropout_rate",
    "feed_forward.activation",
    "norm.eps",
    "use_bias",
)
"""The choices that the reference models offer."""

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class PositionWiseFeedForward(nn.Module):
    """Two linear maps with an activation between (section 3.3)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        activation = config.feed_forward.activation
        if not isinstance(activation, str):
            raise ConfigError(
                f"feed_forward.activation={activation!r} is not supported by the PyTorch "
                f"reference: give one of {', '.join(ACTIVATIONS)}"
            )
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(config.d_model, config.d_ff, config.use_bias)
        self.down = nn.Linear(config.d_ff, config.d_model, config.use_bias)
        self.dropout = nn.Dropout(config.feed_forward.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D] through [B, T, F]."""
        return self.down(self.dropout(self.activation(self.up(x))))


def translation_loss(
    model: nn.Module, batch: PairBatch, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss in nats of the labels that are not padding, and their number.

    `model(source, target, padding_mask)` returns logits [B, T, V].
    """
    source, target = torch.tensor(batch.source), torch.tensor(batch.target).long()
    labels = target[:, 1:].flatten()
    logits = model(source, target[:, :-1], source != PAD).flatten(0, 1)
    nats = F.cross_entropy(
        logits, labels, ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing
    )
    return nats, (labels != PAD).sum()


def norm(config: TransformerConfig) -> nn.LayerNorm:
    """A LayerNorm over d_model, with a bias if `config.use_bias`."""
    return nn.LayerNorm(config.d_model, config.norm.eps, bias=config.use_bias)


def check(config: TransformerConfig, changes: dict[str, Any], preset: str) -> None:
    """Raises `ConfigError` for a choice that the reference does not have; `preset` has none.

    A setting that it lacks must be the default of `TransformerConfig`, or as in `changes`.
    """
    plain = dotted_fields(TransformerConfig(vocab_size=1, d_model=1, d_ff=1, num_heads=1)) | changes
    for name, value in dotted_fields(config).items():
        if name not in _FREE and value != plain[name]:
            raise ConfigError(
                f"{name}={value!r} is not supported by the PyTorch reference: give "
                f"{name}={plain[name]!r}, or a preset that has it, such as {preset}"
            )


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
        """The result [B, N, T, H] and the weights [B, N, T, S].

        `allowed`, which broadcasts to [B, N, T, S], is False where a query may not attend.
        """
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.size)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -1e9)
        weights = scores.softmax(dim=-1)
        return self.dropout(weights) @ value, weights


class MultiHeadAttention(nn.Module):
    """Attention with several heads and four projections (section 3.2.2)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.query = self._projection(config)
        self.key = self._projection(config)
        self.value = self._projection(config)
        self.out = self._projection(config)
        self.attention = ScaledDotProductAttention(config.key_size, config.attention.dropout_rate)

    @staticmethod
    def _projection(config: TransformerConfig) -> nn.Linear:
        return nn.Linear(config.d_model, config.d_model, config.use_bias)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output [B, T, D] for `x` [B, T, D] (queries) and `memory` [B, S, D]."""
        query = self._heads(self.query(x))
        key, value = self._heads(self.key(memory)), self._heads(self.value(memory))
        attended, _ = self.attention(query, key, value, allowed)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, N, T, H]


class Residual(nn.Module):
    """Dropout, residual connection and norm around a sub-layer."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = norm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.norm_first = config.norm.placement == "pre"

    def forward(
        self, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Norm(x + layer(x)), or x + layer(norm(x)) with pre-norm."""
        if self.norm_first:
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
    """Adds sines and cosines of the position, then applies dropout (sections 3.5 and 5.4).

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
        self.table: torch.Tensor
        # The table follows from the config, so the state dict does not hold it.
        self.register_buffer("table", table, persistent=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [B, T, D] plus the table's rows, after dropout."""
        if x.shape[1] > len(self.table):
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens was given, but the positions end at max_len="
                f"{len(self.table)}: shorten it, or build the model with a greater max_len"
            )
        return self.dropout(x + self.table[: x.shape[1]])


class TransformerEncoder(nn.Module):
    """The encoder layers, with a final norm for pre-norm."""

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
    """The decoder layers, with a final norm for pre-norm."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.final_norm = _final_norm(config)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, memory_allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D], causal, with cross-attention to `memory` [B, S, D]."""
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, memory, causal, memory_allowed)
        return self.final_norm(x)


class Transformer(nn.Module):
    """Encoder and decoder with one embedding table, initialised from torch's random state.

    `label_smoothing` is used by `loss`. Raises `ConfigError` for a config that the Transformer of
    the paper does not cover.
    """

    def __init__(self, config: TransformerConfig, label_smoothing: float = 0.0):
        super().__init__()
        placement = "pre" if config.norm.placement == "pre" else "post"
        check(config, {"norm.placement": placement}, "multi30k_tiny")
        self.label_smoothing = label_smoothing
        self.scale = math.sqrt(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionalEncoding(config)
        self.encoder = TransformerEncoder(config)
        self.decoder = TransformerDecoder(config)
        self._initialize()

    def _initialize(self) -> None:
        """Glorot-uniform matrices, a table with standard deviation 1/sqrt(D), zero biases."""
        nn.init.normal_(self.embedding.weight, std=1.0 / self.scale)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `target` [B, T], given `source` [B, S].

        `padding_mask` [B, S] is False at padding.
        """
        allowed = None if padding_mask is None else padding_mask[:, None, None, :]
        memory = self.encoder(self._embed(source), allowed)
        x = self.decoder(self._embed(target), memory, allowed)
        return F.linear(x, self.embedding.weight)

    def loss(self, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss in nats of the labels that are not padding, and their number."""
        return translation_loss(self, batch, self.label_smoothing)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.positions(self.embedding(tokens) * self.scale)


def _final_norm(config: TransformerConfig) -> nn.Module:
    return norm(config) if config.norm.placement == "pre" else nn.Identity()
