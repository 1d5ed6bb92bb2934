"""The encoder-decoder before the Transformer: LSTMs with attention, as a `model` of your own.

Train it with `--training.model experiments.examples.recurrent:Recurrent` of `translation.train`.

The encoder reads in both directions (Bahdanau et al. 2015). The decoder attends with a bilinear
score and feeds the result into its next step (Luong et al. 2015, sections 3.1 and 3.3).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxformer.nn.layers import Embedding, LMHead
from jaxformer.nn.models import Model, make_embedding
from jaxformer.nn.stack import dense_init
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AnyArray

Carry = tuple[jax.Array, jax.Array]
"""The cell state c and the output h of an LSTM, [R, H] each."""


class Source(struct.PyTreeNode):
    """The encoded source, to attend to; `mask` is True at real tokens."""

    keys: Float[Array, "B S H"]
    values: Float[Array, "B S H"]
    mask: Bool[AnyArray, "B S"]


class State(struct.PyTreeNode):
    """State of the decoder: the carry of each layer, and the vector [R, D] it made last."""

    carries: tuple[Carry, ...]
    feed: Float[Array, "R D"]


class RecurrentCache(struct.PyTreeNode):
    """The state of decoding B sentences with W beams: R = B*W rows."""

    state: State
    source: Source
    num_beams: int = struct.field(pytree_node=False)

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> "RecurrentCache":
        """The cache in which beam w continues beam `parents[b, w]`."""
        batch, count = parents.shape

        def gather(leaf: Float[Array, "R F"]) -> Float[Array, "R2 F"]:
            beams = leaf.reshape(batch, self.num_beams, -1)
            beams = jnp.take_along_axis(beams, parents[:, :, None], axis=1)
            return beams.reshape(batch * count, -1)

        return self.replace(state=jax.tree.map(gather, self.state), num_beams=count)


class DecoderStep(nn.Module):
    """One target token: h_t = LSTM(h_{t-1}, [x_t; a_{t-1}]), a_t = tanh(W [context; h_t])."""

    d_model: int
    hidden: int
    num_layers: int

    @nn.compact
    def __call__(
        self, state: State, x: Float[Array, "R D"], source: Source
    ) -> tuple[State, Float[Array, "R D"]]:
        h = jnp.concatenate([x, state.feed], axis=-1)
        carries: list[Carry] = []
        for layer, carry in enumerate(state.carries):
            cell = nn.OptimizedLSTMCell(self.hidden, name=f"layers_{layer}")
            carry, h = cell(carry, h)
            carries.append(carry)
        context = attend(h, source)
        project = nn.Dense(self.d_model, use_bias=False, name="attentional")
        feed = jnp.tanh(project(jnp.concatenate([context, h], axis=-1)))
        return State(tuple(carries), feed), feed


def attend(h: Float[Array, "R H"], source: Source) -> Float[Array, "R H"]:
    """The mean of `source.values`, weighted by softmax(h . key); W rows belong to a sentence."""
    queries = h.reshape(source.keys.shape[0], -1, h.shape[-1])
    scores = jnp.einsum("bwh,bsh->bws", queries, source.keys)
    weights = jax.nn.softmax(jnp.where(source.mask[:, None], scores, -1e30))
    return jnp.einsum("bws,bsh->bwh", weights, source.values).reshape(h.shape)


class Recurrent(Model):
    """An encoder-decoder with LSTMs in place of blocks, called as `EncoderDecoder` is.

    Of the config, `d_model` is the size of embeddings, `d_ff` the size H of the LSTMs (each
    direction of the encoder has half of it), and the numbers of layers and `dropout_rate` mean what
    they say. The other values of a model are not used.
    """

    def setup(self) -> None:
        config = self.config
        self.embedding: Embedding = make_embedding(config, config.vocab_size)
        if not config.ties_inputs:
            size = config.source_vocab_size or config.vocab_size
            self.source_embedding: Embedding = make_embedding(config, size)
        options = config.output
        self.output: LMHead = LMHead(
            config.vocab_size, bool(options.bias), options.softcap, dense_init(config)
        )
        half = config.d_ff // 2
        self.directions = [
            nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(half)), nn.RNN(nn.OptimizedLSTMCell(half)))
            for _ in range(config.num_encoder_layers)
        ]
        self.keys = nn.Dense(config.d_ff, use_bias=False)
        axes: Any = (1, nn.broadcast)  # of the embeddings, and the source that all steps see
        scan = nn.scan(
            DecoderStep,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=axes,
            out_axes=1,
        )
        self.decoder = scan(config.d_model, config.d_ff, config.num_decoder_layers)

    def __call__(
        self,
        source: Int[AnyArray, "B S"],
        target: Int[AnyArray, "B T"],
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        dropout_rng: DropoutRng | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of the token after each of `target`, given `source`."""
        return self.lm_head(self.hidden(source, target, padding_mask, dropout_rng=dropout_rng))

    def lm_head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The logits of `hidden` vectors."""
        return self.output(hidden, self.embedding if self.config.ties_output else None)

    def encode(
        self,
        source: Int[AnyArray, "B S"],
        padding_mask: Bool[AnyArray, "B S"] | None,
        dropout_rng: DropoutRng | None = None,
    ) -> tuple[Source, State]:
        """The encoded `source`, and the decoder's first state: the encoder's last one."""
        config = self.config
        mask = jnp.ones(source.shape, bool) if padding_mask is None else jnp.asarray(padding_mask)
        embedding = self.embedding if config.ties_inputs else self.source_embedding
        x = self.embed(embedding, source, dropout_rng, "source")
        final: Any = None
        for layer, directions in enumerate(self.directions):
            x = DropoutMask(dropout_rng, f"encoder_{layer}", config.dropout_rate)(x)
            final, x = directions(x, seq_lengths=mask.sum(-1), return_carry=True)
        carry = jax.tree.map(lambda *halves: jnp.concatenate(halves, axis=-1), *final)
        feed = jnp.zeros((len(source), config.d_model), x.dtype)
        return Source(self.keys(x), x, mask), State((carry,) * config.num_decoder_layers, feed)

    def hidden(
        self,
        source: Int[AnyArray, "B S"],
        target: Int[AnyArray, "B T"],
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        dropout_rng: DropoutRng | None = None,
    ) -> Float[Array, "B T D"]:
        """As `EncoderDecoder.hidden`."""
        encoded, state = self.encode(source, padding_mask, dropout_rng)
        rate = self.config.dropout_rate
        x = self.embed(self.embedding, target, dropout_rng)
        x = DropoutMask(dropout_rng, "decoder_input", rate)(x)
        _, made = self.decoder(state, x, encoded)
        return DropoutMask(dropout_rng, "decoder_output", rate)(made)

    def init_cache(
        self,
        source: Int[AnyArray, "B S"],
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        max_length: int,
        num_beams: int = 1,
    ) -> RecurrentCache:
        """The state before the first token; it needs no room, so `max_length` does not matter."""
        encoded, state = self.encode(source, padding_mask)
        state = jax.tree.map(lambda leaf: leaf.repeat(num_beams, axis=0), state)
        return RecurrentCache(state, encoded, num_beams)

    def decode_step(
        self, tokens: Int[AnyArray, "B W T"], cache: RecurrentCache
    ) -> tuple[Float[Array, "B W T V"], RecurrentCache]:
        """The logits of the token after each of `tokens`, and the cache after them."""
        x = self.embedding(tokens.reshape(-1, tokens.shape[-1]))
        state, made = self.decoder(cache.state, x, cache.source)
        return self.lm_head(made).reshape(*tokens.shape, -1), cache.replace(state=state)
