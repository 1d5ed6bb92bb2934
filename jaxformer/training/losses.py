"""Losses as sums with counts: both are added over batches and devices, then divided once.

`loss_chunk` is the number of tokens per chunk of logits on each device; 0 computes all logits at
once. Sums and gradients are the same. Chunks need a model with two methods: `hidden`, with the
arguments of `__call__`, and `lm_head(hidden)`, which returns the logits.

`z_loss` times log(Z)^2 is added for each token (see `cross_entropy`).

`balance` times the balance of experts (see `balance_sum`) is added for each token. Its sum is then
the auxiliary sum "balance": divided by the tokens it is 1 where all experts are used equally.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.nn.experts import ROUTING
from jaxformer.nn.heads import take_positions
from jaxformer.nn.nnx_model import NNXModel
from jaxformer.ops.cross_entropy import chunked_sums, cross_entropy
from jaxformer.ops.dropout import DropoutRng
from jaxformer.training.balance import TokenMasks, balance_sum

AnyModel = nn.Module | NNXModel
"""A Linen model, or one of NNX; `params` may then be the NNX model itself, or its `nnx.State`."""

Sums = tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""(loss, tokens) or (loss, tokens, auxiliary): a sum in nats and the number to divide it by.

`auxiliary` {name: sum} holds further sums, which become metrics under their names. They stay sums:
divide each by what it counts.
"""

Loss = Callable[[Any, Any, jax.Array | None], Sums]
"""loss(params, batch, rng) -> `Sums`; rng None means no dropout."""


def seq2seq_loss(
    model: AnyModel,
    *,
    pad: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    balance: float = 0.0,
    loss_chunk: int = 0,
) -> Loss:
    """The loss of an encoder-decoder on batches of `source` [B, S] and `target` [B, T + 1].

    `target` begins with the start token: position t is predicted from those before it. The id
    `pad` marks padding on both sides.

    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, **layers)
    >>> model = jf.EncoderDecoder(config)
    >>> source = jnp.array([[5, 6, jf.EOS]])
    >>> target = jnp.array([[jf.BOS, 7, jf.EOS, jf.PAD]])
    >>> batch = jf.PairBatch.create(source, target, vocab_size=11)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), source, target)["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> nats, count = jax.jit(jf.seq2seq_loss(model, pad=jf.PAD))(params, batch, None)
    >>> float(count), round(float(jnp.exp(nats / count)), 3)  # the labels 7 and EOS, perplexity V
    (2.0, 11.0)
    """

    def read(batch):
        padding_mask = batch.source != pad
        labels = batch.target[:, 1:]
        loss_mask = labels != pad
        inputs = batch.source, batch.target[:, :-1], padding_mask
        return inputs, (labels, loss_mask), {"encoder": padding_mask, "": loss_mask}

    terms = partial(cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss)
    return _token_loss(model, read, terms, loss_chunk, balance)


def causal_loss(
    model: AnyModel, *, z_loss: float = 0.0, balance: float = 0.0, loss_chunk: int = 0
) -> Loss:
    """The loss of a causal language model on batches of `tokens` [B, T + 1].

    Label t is token t + 1, and counts where `loss_mask` [B, T] is true. `segments` and `positions`
    [B, T + 1] tell packed documents apart, or are None.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> batch = jf.StreamBatch.create(jnp.ones((2, 6), int), vocab_size=11)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), batch.tokens)["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> nats, count = jax.jit(jf.causal_loss(model))(params, batch, None)
    >>> float(count), round(float(jnp.exp(nats / count)), 3)  # 2 x 5 labels, perplexity V
    (10.0, 11.0)
    """

    def read(batch):
        inputs = jax.tree.map(lambda x: x[:, :-1], (batch.tokens, batch.segments, batch.positions))
        return inputs, (batch.tokens[:, 1:], batch.loss_mask), {"": batch.loss_mask}

    return _token_loss(model, read, partial(cross_entropy, z_loss=z_loss), loss_chunk, balance)


def masked_loss(
    model: AnyModel, *, z_loss: float = 0.0, balance: float = 0.0, loss_chunk: int = 0
) -> Loss:
    """The loss of a masked language model at `masked_positions` [B, P].

    The labels [B, P] count where `loss_mask` [B, P] is true (Devlin et al. 2019, task 1).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.MaskedLanguageModel(config)
    >>> batch = jf.MaskedBatch(
    ...     tokens=np.array([[1, 5, 3, 3, 2]]),  # 3 is the mask token
    ...     padding_mask=np.ones((1, 5), bool),
    ...     token_type_ids=np.zeros((1, 5), int),
    ...     masked_positions=np.array([[2, 3]]),
    ...     labels=np.array([[6, 7]]),
    ...     loss_mask=np.array([[True, True]]),
    ...     example_ids=np.array([0]),
    ...     next_sentence=np.array([0]),
    ... )
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), batch.tokens)["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> nats, count = jax.jit(jf.masked_loss(model))(params, batch, None)
    >>> float(count), round(float(jnp.exp(nats / count)), 3)  # two labels, perplexity V
    (2.0, 11.0)
    """

    def read(batch):
        inputs = batch.tokens, batch.padding_mask, batch.token_type_ids, batch.masked_positions
        return inputs, (batch.labels, batch.loss_mask), {"": batch.padding_mask}

    return _token_loss(model, read, partial(cross_entropy, z_loss=z_loss), loss_chunk, balance)


def masked_and_next_sentence_loss(
    model: AnyModel, *, z_loss: float = 0.0, loss_chunk: int = 0
) -> Loss:
    """`masked_loss`, plus for each row P times the loss of predicting `next_sentence`.

    `next_sentence` [B] is 1 where sentence B follows sentence A, else 0. If each row has P
    predicted tokens, the sum divided by their number is the sum of two means: the loss of Devlin
    et al. 2019 (appendix A.2).
    """
    terms = partial(cross_entropy, z_loss=z_loss)

    def loss(params, batch, rng):
        def outputs(model, *inputs, dropout_rng):
            if not loss_chunk:
                return model(*inputs, batch.masked_positions, dropout_rng=dropout_rng)
            encoded = model.encoder(*inputs, dropout_rng=dropout_rng)
            hidden = take_positions(encoded.hidden, batch.masked_positions)
            return hidden, model.next_sentence(encoded.pooled)

        inputs = batch.tokens, batch.padding_mask, batch.token_type_ids
        dropout_rng = None if rng is None else DropoutRng(rng, batch.example_ids)
        returned: Any = model.apply(
            {"params": params}, *inputs, dropout_rng=dropout_rng, method=outputs
        )
        output, next_logits = returned
        labels = batch.labels, batch.loss_mask
        if loss_chunk:
            nats, tokens = _in_chunks(terms, model, params, output, labels, loss_chunk)
        else:
            nats, tokens = terms(output, *labels)
        sentence, _ = cross_entropy(
            next_logits, batch.next_sentence, batch.padding_mask.any(axis=-1)
        )
        return nats + batch.masked_positions.shape[1] * sentence, tokens

    return loss


def classification_loss(model: AnyModel) -> Loss:
    """The loss of a classifier on `tokens` [B, T] with one of the classes `labels` [B].

    `padding_mask` [B, T] is False at padding. A row counts where `loss_mask` [B] is true.
    `token_type_ids` [B, T], where the batch has them, tell the sentences of a pair apart.
    """

    def loss(params, batch, rng):
        logits = _logits_of_rows(model, params, batch, rng)
        return cross_entropy(logits, batch.labels, batch.loss_mask)

    return loss


def span_loss(model: AnyModel) -> Loss:
    """The loss of a `SpanPredictor`: the mean of the losses of the answer's start and end.

    The batch is as for `classification_loss`, but `labels` [B, 2] are the positions of the
    first and the last token of the answer.
    """

    def loss(params, batch, rng):
        logits = _logits_of_rows(model, params, batch, rng)
        logits = jnp.where(batch.padding_mask[:, None], logits, jnp.finfo(logits.dtype).min)
        counts = jnp.broadcast_to(batch.loss_mask[:, None], batch.labels.shape)
        nats, num_labels = cross_entropy(logits, batch.labels, counts)
        return nats / 2.0, num_labels / 2.0

    return loss


def _logits_of_rows(model: AnyModel, params: Any, batch: Any, rng: jax.Array | None) -> Any:
    types = getattr(batch, "token_type_ids", None)
    inputs = batch.tokens, batch.padding_mask, *(() if types is None else (types,))
    dropout_rng = None if rng is None else DropoutRng(rng, batch.example_ids)
    return model.apply({"params": params}, *inputs, dropout_rng=dropout_rng)


def _token_loss(
    model: AnyModel,
    read: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...], TokenMasks]],
    terms: Callable[..., Any],
    loss_chunk: int,
    balance: float,
) -> Loss:
    """A loss made of two functions, plus `balance` times the balance of experts.

    `read(batch)` gives the model's inputs, the labels, and the tokens that count for the balance;
    `terms(logits, *labels)` gives the sum in nats and the number of labels. The loss raises
    `ConfigError` for chunks of a model without the method `hidden`.
    """

    def loss(params, batch, rng):
        if loss_chunk and not hasattr(model, "hidden"):
            raise ConfigError(
                f"loss_chunk={loss_chunk} needs a model with the methods hidden and lm_head, but "
                f"{type(model).__name__} has no method hidden: add both, or give loss_chunk=0"
            )
        inputs, labels, masks = read(batch)
        method = "hidden" if loss_chunk else None
        dropout_rng = None if rng is None else DropoutRng(rng, batch.example_ids)
        apply = partial(
            model.apply, {"params": params}, *inputs, dropout_rng=dropout_rng, method=method
        )
        recorded: Any = {}
        if balance:
            output, recorded = apply(mutable=[ROUTING])
        else:
            output = apply()
        if loss_chunk:
            nats, tokens = _in_chunks(terms, model, params, output, labels, loss_chunk)
        else:  # a masked language model has further outputs
            nats, tokens = terms(getattr(output, "logits", output), *labels)
        if not balance:
            return nats, tokens
        of_experts = balance_sum(recorded.get(ROUTING, {}), masks, tokens)
        return nats + balance * of_experts, tokens, {"balance": of_experts}

    return loss


def _in_chunks(
    terms: Any, model: AnyModel, params: Any, hidden: Any, labels: Any, loss_chunk: int
) -> Any:
    """`terms` of the logits of `hidden` and of `labels`, `loss_chunk` tokens at a time."""
    params = nn.unbox(params)  # sharded parameters are gathered here, not for each chunk

    def lm_head(hidden: jax.Array) -> Any:
        return model.apply({"params": params}, hidden, method=lambda m, x: m.lm_head(x))

    return chunked_sums(terms, lm_head, hidden, *labels, chunk=loss_chunk)
