"""The heads that align words, as a notebook measures them."""

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples.notebooks import alignment_heads
from jaxformer.text.tokenizers import BOS, EOS, PAD
from jaxformer.training.losses import seq2seq_loss

SIZES = {"d_model": 12, "d_ff": 14, "num_heads": 3, "num_decoder_layers": 2, "max_len": 11}


@pytest.fixture(scope="module")
def translator(random_params):
    """A model whose second decoder layer attends to one token alone, and its parameters."""
    config = jf.TransformerConfig(13, **SIZES, num_encoder_layers=1)
    model, ids = jf.EncoderDecoder(config), np.ones((2, 5), np.int32)
    params = random_params(model, ids, ids)
    attention = params["decoder"]["blocks_1"]["cross_attention"]
    attention["query"] = jax.tree.map(lambda x: 1e4 * x, attention["query"])
    return model, params


@pytest.fixture(scope="module")
def batch():
    source = np.array([[4, 5, 6, EOS, PAD, PAD], [7, 8, 9, 10, 11, EOS]])
    target = np.array([[BOS, 6, 5, EOS, PAD], [BOS, 7, 12, 4, EOS]])
    return jf.PairBatch.create(source, target, vocab_size=13)


def test_the_loss_without_a_head_is_that_of_the_model_without_it(translator, batch, assert_equal):
    model, params = translator
    loss, effects = alignment_heads.measure(model, params, batch)
    total = jax.jit(seq2seq_loss(model, pad=PAD))

    def loss_without(layer, head):
        pruned = jax.tree.map(np.copy, params)
        block = pruned["decoder"][f"blocks_{layer}"]
        block["cross_attention"]["out"]["kernel"][head] = 0.0
        sums = total(pruned, batch, None)
        return sums[0] / sums[1]

    assert effects.zero.shape == (2, 3)
    assert_equal(loss + effects.zero[0, 2], loss_without(0, 2))
    assert_equal(loss + effects.zero[1, 0], loss_without(1, 0))
    assert np.abs(effects.one_hot[1]).max() < 1e-5 < np.abs(effects.one_hot[0]).max()
    assert np.abs(effects.uniform).min() > 1e-5
