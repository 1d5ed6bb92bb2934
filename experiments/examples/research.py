"""Twelve pieces of research code, each at most 25 lines, to copy from.

`tests/experiments/test_research.py` compares each with the same computation written out.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import export
from jax.sharding import PartitionSpec as P

import jaxformer as jf
from jaxformer.nn.embeddings import LMHead
from jaxformer.nn.recipe import make_stack
from jaxformer.pretrained import torch_layers
from jaxformer.training.losses import Loss

GPT = jf.TransformerConfig(
    vocab_size=23,
    d_model=16,
    d_ff=20,
    num_heads=2,
    num_decoder_layers=3,
    norm=jf.NormOptions(placement="pre"),
)


# 1. A mixture of experts whose balance loss is sown in a loop over blocks.
class Experts(nn.Module):
    """The network of `num_experts` that a router chooses for each token (Fedus et al. 2022)."""

    d_ff: int
    num_experts: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, dropout_rng: jf.DropoutRng | None = None) -> jax.Array:
        shares = nn.softmax(nn.Dense(self.num_experts, name="router")(x))
        chosen = jax.nn.one_hot(shares.argmax(-1), self.num_experts)
        network = nn.vmap(jf.FeedForward, {"params": 0}, {"params": True})
        y = network(self.d_ff, name="experts")(jnp.stack([x] * self.num_experts))
        balance = jnp.sum(chosen.mean((0, 1)) * shares.mean((0, 1)))
        self.sow("losses", "balance", self.num_experts * balance)
        return jnp.einsum("ebtd,bte->btd", y, chosen * shares)


def mixture_of_experts(scan_layers: bool = True) -> tuple[jf.DecoderOnly, Loss]:
    """A language model of experts, and its loss with the balance of all layers."""
    config = replace(GPT, scan_layers=scan_layers)

    def experts(d_ff: int, **_: Any) -> nn.Module:
        return Experts(d_ff)

    model = jf.DecoderOnly(config, block=partial(jf.Block, make_feed_forward=experts))

    def loss(params, batch, rng):
        logits, state = model.apply({"params": params}, batch[:, :-1], mutable=["losses"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        balance = jnp.asarray(optax.tree.sum(state["losses"])) * nats.size
        return jnp.sum(nats) + 0.01 * balance, jnp.float32(nats.size), {"balance": balance}

    return model, loss


# 2. A soft prompt (Lester et al. 2021), and generating after it.
def generate_after_prompt(
    model: jf.DecoderOnly, params: Any, prompt: jax.Array, length: int
) -> jax.Array:
    """The `length` most likely tokens [B, L] after the vectors `prompt` [B, P, D]."""

    def advance(carry: tuple[jax.Array, jf.Cache], _: None) -> Any:
        token, cache = carry
        logits, cache = model.bind({"params": params}).decode_step(token[:, None, None], cache)
        return (logits[:, 0, -1].argmax(-1), cache), token

    bound = model.bind({"params": params})
    cache = bound.init_cache(len(prompt), max_length=prompt.shape[1] + length)
    logits, cache = bound.decode_step(prompt[:, None], cache)
    first = logits[:, 0, -1].argmax(-1), cache
    return jax.lax.scan(advance, first, length=length)[1].T


# 3. A vision encoder (Dosovitskiy et al. 2021) that our decoder reads.
class Captioner(nn.Module):
    """Logits of the words [B, T] of images [B, height, width, channels]."""

    config: jf.TransformerConfig
    patch: int = 4

    @nn.compact
    def __call__(self, images: jax.Array, words: jax.Array) -> jax.Array:
        size, config = (self.patch, self.patch), self.config
        patches = nn.Conv(config.d_model, size, strides=size, name="patches")(images)
        x = patches.reshape(len(images), -1, config.d_model)
        encoder = jf.Encoder(
            num_layers=2,
            num_heads=config.num_heads,
            d_ff=config.d_ff,
            positions=jf.Learned(),
            norm_options=config.norm,
            name="encoder",
        )
        encoded = encoder(x)
        embedding = jf.Embedding(config.vocab_size, config.d_model)
        decoder = make_stack(config, config.num_decoder_layers, cross=True)
        kv = decoder.encoder_keys_values(encoded)
        y = decoder(embedding(words), jf.AttentionMask(causal=True), encoder_kv=kv)
        return LMHead(config.vocab_size)(y, embedding)


# 4. Differential attention (Ye et al. 2025): the difference of two softmax maps.
class DifferentialAttention(jf.MultiHeadAttention):
    """Each head has two maps; a learned share of the second is subtracted from the first."""

    def setup(self) -> None:
        super().setup()
        self.share = self.param("share", nn.initializers.constant(0.3), (1, 1, self.num_heads, 1))

    def attend(self, q: Any, k: Any, v: Any, *rest: Any) -> jax.Array:
        (q1, q2), (k1, k2) = jnp.split(q, 2, axis=-1), jnp.split(k, 2, axis=-1)
        first = super().attend(q1, k1, v, *rest)
        return first - self.share * super().attend(q2, k2, v, *rest)


# 5. Hyper-connections (Zhu et al. 2025): several residual streams around each block.
class HyperEncoder(nn.Module):
    """Blocks that read a learned sum of `streams` residual streams and write to each of them."""

    num_layers: int
    streams: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, mask: jf.AttentionMask) -> jax.Array:
        norm, n = jf.NormOptions(placement="pre"), self.streams
        streams = jnp.repeat(x[None], n, axis=0)
        for i in range(self.num_layers):
            read = self.param(f"read_{i}", lambda _, i=i: jnp.eye(n)[i % n])
            mix = self.param(f"mix_{i}", lambda _: jnp.eye(n))
            write = self.param(f"write_{i}", nn.initializers.ones, (n,))
            x = jnp.einsum("s,s...->...", read, streams)
            y = jf.Block(2, 20, norm_options=norm, name=f"blocks_{i}")(x, mask)
            streams = jnp.einsum("rs,s...->r...", mix, streams)
            streams += jnp.einsum("s,...->s...", write, y - x)
        return streams.mean(axis=0)


# 6. Contrastive decoding (Li et al. 2023): what a large model says more than a small one.
def contrastive_step(
    large: Callable[..., tuple[jax.Array, Any]],
    small: Callable[..., tuple[jax.Array, Any]],
    weight: float,
) -> Callable[[jax.Array, Any], tuple[jax.Array, Any]]:
    """A step for `jf.sample` and `jf.beam_search`; its cache is the pair of both models'."""

    def step(tokens: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        (expert, first), (amateur, second) = large(tokens, caches[0]), small(tokens, caches[1])
        expert, amateur = jax.nn.log_softmax(expert), jax.nn.log_softmax(amateur)
        likely = expert >= expert.max(-1, keepdims=True) + math.log(0.1)
        return jnp.where(likely, expert - weight * amateur, -1e9), (first, second)

    return step


# 7. The gradient of each example, as differential privacy and influence functions need it.
def per_example_gradients(loss: Loss, params: Any, batch: Any) -> Any:
    """The gradient of the loss of each example: leaves [B, ...] of the shape of `params`."""

    def one(params: Any, example: Any) -> jax.Array:
        return loss(params, jax.tree.map(lambda x: x[None], example), None)[0]

    return jax.vmap(jax.grad(one), in_axes=(None, 0))(params, batch)


# 8. The product of the Hessian with a vector (Pearlmutter 1994), forward over reverse.
def hessian_vector_product(loss: Loss, params: Any, batch: Any, vector: Any) -> Any:
    """The Hessian of the summed loss times `vector`, a tree like `params`."""

    def gradient(params: Any) -> Any:
        return jax.grad(lambda params: loss(params, batch, None)[0])(params)

    return jax.jvp(gradient, (params,), (vector,))[1]


# 9. A decoding step as a file that runs without our code.
def exported_step(model: jf.DecoderOnly, params: Any, rows: int, max_length: int) -> bytes:
    """The serialized step: f(params, tokens [B, 1, 1], cache) -> (logits, cache)."""

    def step(params: Any, tokens: jax.Array, cache: jf.Cache) -> tuple[jax.Array, jf.Cache]:
        return model.bind({"params": params}).decode_step(tokens, cache)

    cache = model.bind({"params": params}).init_cache(rows, max_length=max_length)
    tokens = jnp.zeros((rows, 1, 1), jnp.int32)
    return bytes(export.export(jax.jit(step))(params, tokens, cache).serialize())


# 10. One training step under jax.shard_map and jax.pmap.
def sharded_steps(
    loss: Loss, optimizer: optax.GradientTransformation
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The step by `jax.shard_map` and by `jax.pmap`, over all devices, equal to `jax.jit`'s.

    The first takes a batch [B, ...], the second [devices, B / devices, ...].
    """
    reduce = partial(jax.lax.psum, axis_name="data")
    step = jf.make_train_step(loss, optimizer, reduce=reduce)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(mapped), jax.pmap(step, "data", in_axes=(None, 0), out_axes=None)


# 11. Weights of torch's own layers, in and out.
def from_torch(state: Mapping[str, np.ndarray], num_heads: int, d_ff: int) -> tuple[jf.Block, Any]:
    """A block and its parameters that compute what a `torch.nn.TransformerEncoderLayer` does."""
    block = jf.Block(num_heads, d_ff, norm_options=jf.NormOptions(eps=1e-5))
    x = jnp.zeros((1, 1, len(state["norm1.weight"])))
    like = jax.eval_shape(block.init, jax.random.key(0), x)["params"]
    return block, torch_layers.to_jax(state, torch_layers.encoder_layer(state), like)


# 12. Saliency: which words a prediction depends on.
def saliency(model: jf.DecoderOnly, params: Any, tokens: jax.Array) -> jax.Array:
    """Gradient times input [B, T] of the last token's best logit (Shrikumar et al. 2017)."""

    def best(vectors: jax.Array) -> jax.Array:
        logits = model.bind({"params": params})(vectors)
        return jnp.sum(logits[:, -1].max(axis=-1))

    vectors = params["embedding"]["table"][tokens] * math.sqrt(model.config.d_model)
    return jnp.sum(jax.grad(best)(vectors) * vectors, axis=-1)
