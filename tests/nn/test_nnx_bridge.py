"""The modules work inside a Flax NNX model, through Flax's own bridge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxformer.config import NormOptions, TransformerConfig
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.cross_entropy import cross_entropy

CONFIG = TransformerConfig(
    vocab_size=13,
    d_model=12,
    d_ff=17,
    num_heads=3,
    num_encoder_layers=1,
    num_decoder_layers=1,
    norm=NormOptions(placement="pre"),
)


@pytest.mark.slow
def test_an_encoder_decoder_trains_inside_nnx_with_the_same_logits(rng, assert_equal):
    source = rng.integers(1, 13, (3, 7))
    target = rng.integers(1, 13, (3, 5))
    labels = np.roll(target, -1, axis=1)
    model = nnx.bridge.ToNNX(EncoderDecoder(CONFIG), rngs=nnx.Rngs(0))
    model = nnx.bridge.lazy_init(model, source, target)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    linen = jax.jit(EncoderDecoder(CONFIG).apply)({"params": params}, source, target)
    assert_equal(nnx.jit(lambda model: model(source, target))(model), linen)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(source, target)
            total, tokens = cross_entropy(logits, labels, jnp.ones(labels.shape, bool))
            return total / tokens

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]
