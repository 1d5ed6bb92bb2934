"""`torch.nn.Transformer` as its users complete it: embeddings, positions, output, loss."""

import math
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from experiments.pytorch_twin.parts import translation_loss
from jaxformer.config import TransformerConfig
from jaxformer.data import PairBatch
from jaxformer.positions import sinusoidal_positions


class Translator(nn.Module):
    """The model that `EncoderDecoder` and the twin are of a pre-norm config with tied embeddings.

    Dropout is where theirs is: torch ties that on attention's weights and inside the feed-forward
    networks to that on sub-layers, and these two are switched off.
    """

    def __init__(self, config: TransformerConfig, smoothing: float):
        super().__init__()
        self.smoothing = smoothing
        self.scale = math.sqrt(config.d_model)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=1.0 / self.scale)
        table = torch.tensor(sinusoidal_positions(config.max_len, config.d_model))
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
                layer_norm_eps=config.norm_eps,
                batch_first=True,
            )
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, source_valid: torch.Tensor
    ) -> torch.Tensor:
        """Logits [B, T, V] for the token after each of `target` [B, T], given `source` [B, S]."""
        absent = ~source_valid
        past = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=past,
            tgt_is_causal=True,
            src_key_padding_mask=absent,
            memory_key_padding_mask=absent,
        )
        return F.linear(x, self.embedding.weight)

    def loss(self, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of nats of the labels of `batch` that are no padding, and their number."""
        return translation_loss(self, batch, self.smoothing)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]
        return self.dropout(x)
