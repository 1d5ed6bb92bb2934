"""A compiled gradient grows evenly with depth, and copies no intermediate."""

import re

import jax
import numpy as np
import pytest

from jaxformer import DecoderOnly, TransformerConfig, causal_loss
from jaxformer.config import EmbeddingOptions, FeedForwardOptions, NormOptions
from jaxformer.runtime import setup_process
from jaxformer.text.data import StreamBatch
from tests.two_processes import finished, start

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("optimized")]

DEPTHS = (1, 2, 3)


def compiled_gradient(depth, placement="pre", dropout_rate=0.0, rows=3, **options):
    config = TransformerConfig(
        vocab_size=29,
        d_model=26,
        d_ff=62,
        num_heads=2,
        num_decoder_layers=depth,
        norm=NormOptions(placement=placement),
        dropout_rate=dropout_rate,
        feed_forward=FeedForwardOptions("gelu"),
        embeddings=EmbeddingOptions(tied="output"),
    )
    model = DecoderOnly(config)
    tokens = np.zeros((rows, 18), np.int32)
    batch = StreamBatch(tokens, np.ones((rows, 17), bool), np.arange(rows), None, None)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])["params"]
    gradient = jax.grad(causal_loss(model), has_aux=True)
    lowered = jax.jit(gradient, **options).lower(params, batch, jax.random.key(0))
    return lowered.compile().as_text()


@pytest.fixture(scope="module")
def programs():
    return [compiled_gradient(depth) for depth in DEPTHS]


def test_each_layer_adds_equally_many_instructions(programs):
    """XLA on a CPU recomputes in each weight's gradient what later layers added, if it can."""
    one, two, three = (text.count(" = ") for text in programs)
    assert three - two == pytest.approx(two - one, rel=0.03)


def test_each_layer_after_a_norm_and_dropout_adds_equally_many_instructions():
    code = "from tests.nn import test_depth; test_depth.print_counts()"
    usual = {"XLA_FLAGS": ""}  # the loops that users' programs have
    (done,) = finished(start("-c", code, environment=usual))
    one, two, three = map(int, done.out.split())
    assert three - two == pytest.approx(two - one, rel=0.03)


def print_counts():
    """The instructions of post-norm models with dropout, compiled as the experiments do it.

    Vectors of fewer than 4,096 numbers XLA recomputes in any case.
    """
    options = {"compiler_options": setup_process().compiler_options}
    for depth in DEPTHS:
        print(compiled_gradient(depth, "post", 0.3, rows=13, **options).count(" = "))


def test_no_fusion_reads_what_many_layers_wrote(programs):
    reads = [re.findall(r"fusion\(([^)]*)\)", text) for text in programs]
    one, two, three = (max(read.count("%") for read in fusions) for fusions in reads)
    assert one == two == three


def test_the_gradient_of_a_matrix_is_made_of_what_is_there(programs):
    """XLA on a CPU would turn the hidden layer's gradient first, of 3 rows of 17 tokens."""
    turned = [re.findall(r"\S+ = f32\[62,(?:51|3,17)\]\S* (?!bitcast)", text) for text in programs]
    assert turned == [[], [], []]
