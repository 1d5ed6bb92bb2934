"""A training step as it is written for a GPU, computed on the CPU, beside that for the CPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import DecoderOnly, OptimizerConfig, TransformerConfig
from jaxformer.config import EmbeddingOptions, FeedForwardOptions, NormOptions
from jaxformer.ops import dense
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.train_step import init_train_state, make_train_step

CONFIG = TransformerConfig(
    vocab_size=37,
    d_model=24,
    d_ff=40,
    num_heads=2,
    num_decoder_layers=2,
    max_len=16,
    norm=NormOptions(placement="pre"),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output"),
)


def batch_of(rng, rows=5, length=13):
    """Rows in which a token follows from the last one, three times of four."""
    tokens = rng.integers(0, CONFIG.vocab_size, (rows, length + 1))
    for position in range(length):
        following = (5 * tokens[:, position] + 3) % CONFIG.vocab_size
        is_random = rng.random(rows) < 0.25
        tokens[:, position + 1] = np.where(is_random, tokens[:, position + 1], following)
    return StreamBatch.create(tokens.astype(np.int32), vocab_size=CONFIG.vocab_size)


def test_the_loss_and_its_gradients_for_a_gpu_are_those_for_a_cpu(
    rng, random_params, assert_equal, choose_platform
):
    model, batch = DecoderOnly(CONFIG), batch_of(rng)
    params = random_params(model, batch.tokens[:, :-1])
    results = {}
    for platform in ("cpu", "cuda"):
        choose_platform(platform)
        loss = causal_loss(model)  # a new function, so that it is traced again

        def mean(params):
            nats, tokens = loss(params, batch, None)  # noqa: B023
            return nats / tokens

        results[platform] = jax.jit(jax.value_and_grad(mean))(params)
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert_equal(a, b, 1e-6)


@pytest.mark.slow
def test_200_steps_with_stored_bfloat16_logits_have_the_loss_of_those_with_float32(
    choose_platform, monkeypatch
):
    choose_platform("cuda")
    model = DecoderOnly(replace(CONFIG, dtype="bfloat16"))
    optimizer = make_optimizer(
        OptimizerConfig(schedule="constant", learning_rate=3e-3, warmup_steps=0)
    )
    losses = {}
    for stored in ("bfloat16", "float32"):
        if stored == "float32":
            product = dense._product
            monkeypatch.setattr(dense, "_product", lambda x, m, rounded=False: product(x, m))  # noqa: B023
        rng = np.random.default_rng(2)
        tokens = jnp.zeros((2, 13), jnp.int32)
        params = model.init(jax.random.key(2), tokens)["params"]
        state = init_train_state(params, optimizer, jax.random.key(1))
        step = jax.jit(make_train_step(causal_loss(model), optimizer))
        sums = np.zeros(2)
        for number in range(200):
            state, metrics = step(state, batch_of(rng, rows=29))
            if number >= 180:
                sums += float(metrics["loss"]), float(metrics["tokens"])
        losses[stored] = sums[0] / sums[1]
    first = np.log(CONFIG.vocab_size)
    assert losses["float32"] < 0.8 * first
    assert losses["bfloat16"] != losses["float32"]
    assert abs(losses["bfloat16"] - losses["float32"]) < 1e-3, losses
