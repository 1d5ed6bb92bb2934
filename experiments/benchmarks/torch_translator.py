"""`torch.nn.Transformer` with embeddings, positions, output and loss."""

import math
import warnings
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from experiments.torch_reference.transformer import translation_loss
from jaxformer.config import TransformerConfig
from jaxformer.config.positions import positional_encoding
from jaxformer.text.data import PairBatch


class Translator(nn.Module):
    """The same function as `EncoderDecoder` of a pre-norm config with tied embeddings.

    Dropout is applied to sub-layers and embeddings only. torch also applies it to attention weights
    and inside feed-forward networks; both are switched off here.
    """

    def __init__(self, config: TransformerConfig, label_smoothing: float):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.scale = math.sqrt(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=1.0 / self.scale)
        self.positions: torch.Tensor
        table = torch.tensor(positional_encoding(config.max_len, config.d_model))
        self.register_buffer("positions", table, persistent=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pre-norm layers have no nested tensors
            self.transformer = nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.d_ff,
                config.dropout_rate,
                norm_first=True,
                layer_norm_eps=config.norm.eps,
                batch_first=True,
            )
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                cast(nn.Dropout, module.dropout).p = 0.0

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, padding_mask: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `target` [B, T], given `source` [B, S]."""
        padding = ~padding_mask
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(x, self.embedding.weight)

    def loss(self, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the summed loss of the labels of `batch` in nats, and their number."""
        return translation_loss(self, batch, self.label_smoothing)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]
        return self.dropout(x)
