"""Losses as sums with counts: both are added over batches and devices, then divided once.

`loss_chunk` is the number of tokens per chunk of logits on each device (R-Drop has two rows of
logits for a token); 0 computes all logits at once. Sums and gradients are the same. Chunks need a
model with two methods: `hidden`, with the arguments of `__call__`, and `lm_head(hidden)`, which
returns the logits.

`z_loss` times log(Z)^2 is added for each token (see `cross_entropy`). `r_drop` is the weight of
R-Drop (Liang et al. 2021): each example is computed twice, with two dropout masks, and the loss is
half of equation 4: the mean cross-entropy of the two passes, plus `r_drop` / 2 times the symmetric
Kullback-Leibler divergence between them, whose sum is the auxiliary sum "kl". Without an rng there
is one pass and no divergence.

`distillation` is the weight of a teacher (Kim & Rush 2016, section 3.1): the loss is 1 -
`distillation` times that of the labels plus `distillation` times the cross-entropy with the
distribution of `batch.teacher_logits` [B, T, V], whose sum is the auxiliary sum "teacher_loss".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.errors import ConfigError
from jaxformer.nn.heads import take_positions
from jaxformer.ops.cross_entropy import (
    LossAndSums,
    chunked_sums,
    cross_entropy,
    soft_cross_entropy,
    symmetric_kl,
)
from jaxformer.ops.dropout import DropoutRng

Sums = tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""(loss, tokens) or (loss, tokens, auxiliary): a sum in nats and the number to divide it by.

`auxiliary` {name: sum} holds further sums, which become metrics under their names. They stay sums:
divide each by what it counts.
"""

Loss = Callable[[Any, Any, jax.Array | None], Sums]
"""loss(params, batch, rng) -> `Sums`; rng None means no dropout."""


def seq2seq_loss(
    model: nn.Module,
    *,
    pad: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    r_drop: float = 0.0,
    distillation: float = 0.0,
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

    def inputs_and_labels(batch):
        inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
        return (batch.source, inputs, batch.source != pad), labels, labels != pad

    terms = _Terms(label_smoothing, z_loss, r_drop, distillation)
    return _token_loss(model, inputs_and_labels, terms, loss_chunk)


def causal_loss(
    model: nn.Module, *, z_loss: float = 0.0, r_drop: float = 0.0, loss_chunk: int = 0
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

    def inputs_and_labels(batch):
        leaves = batch.tokens, batch.segments, batch.positions
        inputs = (None if leaf is None else leaf[:, :-1] for leaf in leaves)
        return inputs, batch.tokens[:, 1:], batch.loss_mask

    return _token_loss(model, inputs_and_labels, _Terms(z_loss=z_loss, r_drop=r_drop), loss_chunk)


def masked_loss(
    model: nn.Module, *, z_loss: float = 0.0, r_drop: float = 0.0, loss_chunk: int = 0
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

    def inputs_and_labels(batch):
        inputs = batch.tokens, batch.padding_mask, batch.token_type_ids, batch.masked_positions
        return inputs, batch.labels, batch.loss_mask

    return _token_loss(model, inputs_and_labels, _Terms(z_loss=z_loss, r_drop=r_drop), loss_chunk)


def masked_and_next_sentence_loss(
    model: nn.Module, *, z_loss: float = 0.0, loss_chunk: int = 0
) -> Loss:
    """`masked_loss`, plus for each row P times the loss of predicting `next_sentence`.

    `next_sentence` [B] is 1 where sentence B follows sentence A, else 0. If each row has P
    predicted tokens, the sum divided by their number is the sum of two means: the loss of Devlin
    et al. 2019 (appendix A.2).
    """
    sums_of = _make_sums(model, _Terms(z_loss=z_loss), loss_chunk)

    def loss(params, batch, rng):
        def outputs(model, *inputs, dropout_rng):
            if not loss_chunk:
                return model(*inputs, batch.masked_positions, dropout_rng=dropout_rng)
            encoded = model.encode(*inputs, dropout_rng=dropout_rng)
            hidden = take_positions(encoded.hidden, batch.masked_positions)
            return hidden, model.next_sentence_head(encoded.pooled)

        inputs = batch.tokens, batch.padding_mask, batch.token_type_ids
        ids = batch.example_ids
        output, next_logits = _apply(model, params, rng, ids, *inputs, method=outputs)
        nats, _ = sums_of(params, [output], batch.labels, batch.loss_mask)
        sentence, _ = cross_entropy(
            next_logits, batch.next_sentence, batch.padding_mask.any(axis=-1)
        )
        nats += batch.masked_positions.shape[1] * sentence
        return nats, jnp.sum(batch.loss_mask, dtype=jnp.float32)

    return loss


def classification_loss(model: nn.Module) -> Loss:
    """The loss of a classifier on `tokens` [B, T] with one of the classes `labels` [B].

    `padding_mask` [B, T] is False at padding. A row counts where `loss_mask` [B] is true.
    `token_type_ids` [B, T], where the batch has them, tell the sentences of a pair apart.
    """

    def loss(params, batch, rng):
        logits = _apply(model, params, rng, batch.example_ids, *_row_inputs(batch))
        return cross_entropy(logits, batch.labels, batch.loss_mask)

    return loss


def span_loss(model: nn.Module) -> Loss:
    """The loss of a `SpanPredictor`: the mean of those of the start and the end of the answer.

    The batch is as that of `classification_loss`, but `labels` [B, 2] are the positions of the
    first and the last token of the answer.
    """

    def loss(params, batch, rng):
        logits = _apply(model, params, rng, batch.example_ids, *_row_inputs(batch))
        logits = jnp.where(batch.padding_mask[:, None], logits, jnp.finfo(logits.dtype).min)
        counts = jnp.broadcast_to(batch.loss_mask[:, None], batch.labels.shape)
        nats, num_labels = cross_entropy(logits, batch.labels, counts)
        return nats / 2.0, num_labels / 2.0

    return loss


def _row_inputs(batch: Any) -> tuple[Any, ...]:
    """Tokens, padding mask and, where there are any, token types of a batch."""
    types = getattr(batch, "token_type_ids", None)
    return batch.tokens, batch.padding_mask, *(() if types is None else (types,))


@dataclass(frozen=True)
class _Terms:
    """What is added to the cross-entropy of tokens, as the module explains."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    r_drop: float = 0.0
    distillation: float = 0.0

    def __call__(
        self,
        passes: Sequence[jax.Array],
        labels: jax.Array,
        loss_mask: jax.Array,
        teacher_logits: jax.Array | None = None,
    ) -> LossAndSums:
        """The sum in nats and further sums of the logits [..., V] of each pass."""

        def mean(term: Callable[[jax.Array], jax.Array]) -> Any:
            return sum(map(term, passes)) / len(passes)

        options = self.label_smoothing, self.z_loss
        nats = mean(lambda logits: cross_entropy(logits, labels, loss_mask, *options)[0])
        auxiliary = {}
        if teacher_logits is not None:
            teacher = mean(lambda logits: soft_cross_entropy(logits, teacher_logits, loss_mask))
            nats = (1.0 - self.distillation) * nats + self.distillation * teacher
            auxiliary["teacher_loss"] = teacher
        if len(passes) == 2:
            first, second = passes
            auxiliary["kl"] = symmetric_kl(first, second, loss_mask)
            nats += self.r_drop / 2.0 * auxiliary["kl"]
        return nats, auxiliary


def _make_sums(model: nn.Module, terms: _Terms, loss_chunk: int) -> Callable[..., LossAndSums]:
    """sums_of(params, passes, *leaves): `terms` of logits, or of hidden where there are chunks."""
    if not loss_chunk:
        return lambda _, passes, *leaves: terms(passes, *leaves)
    if not hasattr(model, "hidden"):
        raise ConfigError(
            f"loss_chunk={loss_chunk} needs a model with the methods hidden and lm_head, but "
            f"{type(model).__name__} has no method hidden: add both, or give loss_chunk=0"
        )

    def sums_of(params, passes, *leaves):
        params = nn.unbox(params)  # sharded parameters are gathered here, not for each chunk

        def lm_head(hidden: jax.Array) -> Any:
            return model.apply({"params": params}, hidden, method=lambda m, x: m.lm_head(x))

        return chunked_sums(terms, lm_head, passes, *leaves, chunk=loss_chunk)

    return sums_of


def _token_loss(
    model: nn.Module,
    inputs_and_labels: Callable[[Any], tuple[Iterable[Any], jax.Array, jax.Array]],
    terms: _Terms,
    loss_chunk: int,
) -> Loss:
    """The loss of predicting the labels of inputs_and_labels(batch), which also has their mask."""
    sums_of = _make_sums(model, terms, loss_chunk)
    method = "hidden" if loss_chunk else "__call__"

    def loss(params, batch, rng):
        inputs, labels, loss_mask = inputs_and_labels(batch)
        ids, count = batch.example_ids, 1
        if terms.r_drop and rng is not None:  # each row twice, with ids of other dropout masks
            ids, count = jnp.stack([ids, ~ids], axis=1).reshape(-1), 2
            inputs = jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), tuple(inputs))
        output = _apply(model, params, rng, ids, *inputs, method=method)
        output = getattr(output, "logits", output)  # a masked language model has further outputs
        rows = output.reshape(-1, count, *output.shape[1:])
        passes = [rows[:, number] for number in range(count)]
        leaves = (labels, loss_mask, *([batch.teacher_logits] if terms.distillation else []))
        nats, auxiliary = sums_of(params, passes, *leaves)
        tokens = jnp.sum(loss_mask, dtype=jnp.float32)
        return (nats, tokens, auxiliary) if auxiliary else (nats, tokens)

    return loss


def _apply(
    model: nn.Module,
    params: Any,
    rng: jax.Array | None,
    example_ids: jax.Array,
    *inputs: Any,
    method: Any = None,
) -> Any:
    """The result of `method` of the model for `inputs`, with dropout unless `rng` is None."""
    dropout_rng = None if rng is None else DropoutRng.create(rng, example_ids)
    return model.apply({"params": params}, *inputs, dropout_rng=dropout_rng, method=method)
