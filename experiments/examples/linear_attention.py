"""Linear attention between softmax attention: `python -m experiments.examples.linear_attention`.

A layer that keeps one matrix for each head instead of the keys and values of all tokens. It trains
in chunks, decodes with a cache of its own in `jf.complete` and in beam search, and is given to any
model, to runs too: `--training.block experiments.examples.linear_attention:alternating`.
The text is the file that is given, or the source of jaxformer: two minutes on two cores.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxformer as jf
from experiments.examples.character_models import add_options, read_characters, train
from jaxformer.nn.dense import Dense
from jaxformer.nn.remat import REMAT
from jaxformer.ops.manual_axes import vary_alike

CHUNK = 64
"""The tokens that see each other directly; earlier ones are seen through the state."""


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    starts: jax.Array,
    state: jax.Array,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """o_t = S_t^T q_t with S_t = a_t S_{t-1} + k_t v_t^T, and the last S; float32 (Dao & Gu 2024).

    `q` and `k` [B, T, N, H], `v` [B, T, N, Hv], `log_decay` [B, T, N] the logarithms of a_t, which
    are at most 0, `state` [B, N, H, Hv] the first S. `starts` [B, T] is True where S is forgotten
    before the token: the first one of a document.

    As in section 6 of the paper, tokens of a `chunk` see each other by a product with a mask of
    decays, and all earlier ones by S: T / chunk steps, each of products of matrices.
    """
    batch, length = q.shape[:2]
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def in_chunks(x: jax.Array) -> jax.Array:
        """[B, T, ...] as [T / chunk, B, chunk, ...]; what is added changes no state."""
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, count * chunk - length)
        x = jnp.pad(x, widths)
        return x.reshape(batch, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    def step(state: jax.Array, of_chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, starts = of_chunk
        total = jnp.cumsum(log_decay, axis=1)  # [B, t, N]: the logarithm of a_1 ... a_t
        document = jnp.cumsum(starts, axis=1)  # [B, t]; 0 is the one of `state`
        sees = (document[:, :, None] == document[:, None]) & jnp.tri(chunk, dtype=bool)[None]
        decay = jnp.where(sees[..., None], total[:, :, None] - total[:, None], -jnp.inf)
        weights = jnp.exp(decay)  # [B, t, s, N]: a_{s+1} ... a_t
        kept = jnp.where(document[..., None] == 0, jnp.exp(total), 0)  # [B, t, N] of `state`
        inside = jnp.einsum("btnh,bsnh,btsn,bsnv->btnv", q, k, weights, v)
        before = jnp.einsum("btnh,btn,bnhv->btnv", q, kept, state)
        added = jnp.einsum("bsnh,bsn,bsnv->bnhv", k, weights[:, -1], v)
        state = kept[:, -1, :, None, None] * state + added
        return state, inside + before

    # Inside `jax.shard_map` a scan's first state has to vary along the same axes as its last.
    state, *arrays = vary_alike([x.astype(jnp.float32) for x in (state, q, k, v, log_decay)])
    chunks = tuple(map(in_chunks, (*arrays, starts)))
    state, out = jax.lax.scan(step, state, chunks)
    return out.swapaxes(0, 1).reshape(batch, -1, *v.shape[2:])[:, :length], state


class MatrixState(jf.LayerState):
    """S [B, W, N, H, Hv] of a layer: W beams of B sentences."""

    matrix: jax.Array


class LinearAttention(jf.MultiHeadAttention):
    """Gated linear attention: a sum over all tokens so far, which each head forgets at its pace.

    y = W_o (silu(W_g x) * norm(o)), where o is `linear_attention` of queries, keys and values and
    of a_t = sigmoid(W_a x_t + b)^(1/16) (Yang et al. 2024, with one number for each head as in Dao
    & Gu 2024). It has the fields of softmax attention, with which it is mixed; a softcap, dropout
    of weights and windows act there alone, and so do position schemes: order is in a_t.

    Documents of a packed row start from nothing, and padding is left out. Raises `ConfigError`
    where it would be another function: in an encoder, of another text, for an explicit mask.
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "decay/kernel": "embed -> heads",
        "decay/bias": "heads",
        "gate/kernel": "embed -> heads head_dim",
    }

    def setup(self) -> None:
        super().setup()
        self.decay: nn.Module = nn.Dense(self.num_heads)
        self.gate: Dense = Dense(use_bias=False, kernel_init=self.kernel_init, dtype=self.dtype)
        self.head_norm: nn.Module = jf.Norm("rms")

    def __call__(
        self,
        x: jax.Array,
        kv: Any = None,
        mask: jf.AttentionMask | None = None,
        *,
        rotation: Any = None,
        bias: Any = None,
        dropout_rng: Any = None,
    ) -> jax.Array:
        """As of softmax attention, for a causal `mask`."""
        if kv is not None or mask is None or not mask.causal or mask.explicit is not None:
            raise jf.ConfigError(
                "linear attention reads one text from left to right: give AttentionMask("
                "causal=True) without explicit and without kv, in a DecoderOnly"
            )
        y, _ = self.read(x, self.init_cache(len(x), 1, 0, x.shape[-1]), mask)
        return y

    def init_cache(self, batch_size: int, num_beams: int, max_length: int, d_model: int) -> Any:
        """The `MatrixState` before the first token, of the same size for any `max_length`."""
        size = self.head_dim or d_model // self.num_heads
        shape = batch_size, num_beams, self.num_heads, size, self.value_head_dim or size
        return MatrixState(jnp.zeros(shape, jnp.float32))

    def decode(
        self,
        x: jax.Array,
        layer_cache: Any,
        mask: jf.AttentionMask,
        *,
        rotation: Any = None,
        bias: Any = None,
    ) -> tuple[jax.Array, Any]:
        """The outputs of the tokens `x` [B*W, T, D] after the `MatrixState`, and the new one.

        A mask of beams says which keys a beam sees; here each beam has a state.
        """
        return self.read(x, layer_cache, jf.AttentionMask(causal=True))

    def read(
        self, x: jax.Array, cache: MatrixState, mask: jf.AttentionMask
    ) -> tuple[jax.Array, MatrixState]:
        """The outputs of the tokens `x`, and the state after them."""
        q, (k, v) = self.queries(x), self.keys_values(x)
        q = q * (self.query_scalar or q.shape[-1]) ** -0.5
        k, v = (jnp.repeat(y, self.num_heads // y.shape[2], axis=2) for y in (k, v))
        log_decay = nn.log_sigmoid(self.decay(x.astype(jnp.float32))) / 16
        starts = jnp.zeros(x.shape[:2], bool)
        if mask.query_segments is not None:
            segments = jnp.asarray(mask.query_segments)
            starts = starts.at[:, 1:].set(segments[:, 1:] != segments[:, :-1])
        if mask.padding_mask is not None:
            real = jnp.asarray(mask.padding_mask)[..., None]
            k, log_decay = jnp.where(real[..., None], k, 0), jnp.where(real, log_decay, 0)
        state = cache.matrix.reshape(-1, *cache.matrix.shape[2:])
        heads, state = linear_attention(q, k, v, log_decay, starts, state)
        heads = self.head_norm(heads) * nn.silu(self.gate(x, heads.shape[2:]).astype(jnp.float32))
        y = self.out(heads.astype(self.dtype), x.shape[-1])
        return y, cache.replace(matrix=state.reshape(cache.matrix.shape))


def alternating(
    *, layer: int | None = None, block: Callable[..., nn.Module] = jf.Block, **fields: Any
) -> nn.Module:
    """A block of linear attention in the layers 0, 2, ..., of softmax attention in the others.

    It is made from the fields of `jf.Block`. Raises `ConfigError` in a loop over layers, which are
    all alike there: use `Pair`.
    """
    if layer is None:
        raise jf.ConfigError(
            "scan_layers=True makes all blocks alike: give block=linear_attention.Pair and half as "
            "many layers"
        )
    make_attention = LinearAttention if layer % 2 == 0 else jf.MultiHeadAttention
    return block(layer=layer, make_attention=make_attention, **fields)


recomputing = partial(alternating, block=REMAT["blocks"])
"""`alternating`, whose backward pass computes each block again, as --training.remat blocks does."""


class Pair(jf.Block):
    """Two blocks, of linear and of softmax attention, as one: for a loop over pairs of layers.

    Its cache is a dict of what the two keep.
    """

    def setup(self) -> None:
        differing = {"parent", "name", "layer", "make_attention"}
        names = [field.name for field in fields(jf.Block) if field.name not in differing]
        shared = {name: getattr(self, name) for name in names}
        self.linear: jf.Block = jf.Block(make_attention=LinearAttention, **shared)
        self.softmax: jf.Block = jf.Block(**shared)

    def __call__(self, x: jax.Array, mask: Any = None, **inputs: Any) -> jax.Array:
        """As of `jf.Block`."""
        return self.softmax(self.linear(x, mask, **inputs), mask, **inputs)

    def init_cache(self, *sizes: int) -> dict[str, Any]:
        """As of `jf.Block`."""
        parts = {"linear": self.linear, "softmax": self.softmax}
        return {name: block.init_cache(*sizes) for name, block in parts.items()}

    def decode(
        self, x: jax.Array, layer_cache: Any, mask: Any, **inputs: Any
    ) -> tuple[jax.Array, Any]:
        """As of `jf.Block`."""
        x, linear = self.linear.decode(x, layer_cache["linear"], mask, **inputs)
        x, softmax = self.softmax.decode(x, layer_cache["softmax"], mask, **inputs)
        return x, {"linear": linear, "softmax": softmax}


parser = argparse.ArgumentParser(description=__doc__)
add_options(parser)
parser.add_argument("--d_model", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--characters", type=int, default=64, help="characters to generate")


def best_beam(loaded: jf.Loaded, prompt: str, count: int, beam_size: int = 4) -> str:
    """The most likely of the `count` characters after `prompt` that a beam search finds."""
    tokenizer = loaded.require_tokenizer()
    ids = jnp.array([tokenizer.encode(prompt)])
    search = jf.SearchConfig(beam_size=beam_size, max_new_tokens=count, at_max_length="cut")

    @jax.jit
    def best(params: Any) -> jax.Array:
        model = loaded.model.bind({"params": params})
        cache = model.init_cache(1, max_length=ids.shape[1] + count)
        _, cache = model.decode_step(ids[:, None, :-1], cache)
        # All beams continue the one that has read the prompt.
        cache = cache.reorder_beams(jnp.zeros((1, beam_size), jnp.int32))
        step = jf.make_step_fn(loaded.model, params)
        return jf.beam_search(step, cache, ids[:, -1], jnp.array([count]), search).tokens[0, 0]

    return tokenizer.decode(best(loaded.params).tolist())


def main(args: list[str] | None = None) -> dict[str, float]:
    """Trains both kinds of model on the text; returns their losses of the held-out text."""
    options = parser.parse_args(args)
    characters = read_characters(options.text)
    config = jf.TransformerConfig(
        vocab_size=characters.tokenizer.vocab_size,
        d_model=options.d_model,
        d_ff=4 * options.d_model,
        num_heads=2,
        num_decoder_layers=options.layers,
        max_len=len(characters.beginning) + options.length + options.characters,
        positions=jf.Rotary(),
        norm=jf.NormOptions("rms", placement="pre"),
    )
    _, softmax = train(jf.DecoderOnly(config), characters, options)
    loaded, mixed = train(jf.DecoderOnly(config, block=alternating), characters, options)
    prompt, count = characters.beginning, options.characters
    sampled = jf.complete(loaded, prompt, max_new_tokens=count, temperature=0.8)
    print(f"\n{prompt}|{sampled}\n\nby beams: |{best_beam(loaded, prompt, count)}")
    return {"softmax": softmax, "alternating": mixed}


if __name__ == "__main__":
    main()
