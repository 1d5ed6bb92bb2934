"""Keys and values stay where they were written: no step of a compiled search copies them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import DecoderOnly, TransformerConfig
from jaxformer.config import AttentionOptions
from jaxformer.decoding import SamplerInputs, SamplingConfig, SearchConfig, beam_search, sample
from jaxformer.pipelines import make_step_fn

pytestmark = pytest.mark.usefixtures("optimized")

L = 23  # places


def compiled(num_kv_heads, rows, beams, layers):
    config = TransformerConfig(
        vocab_size=29,
        d_model=20,
        d_ff=31,
        num_heads=4,
        head_dim=5,
        attention=AttentionOptions(num_kv_heads=num_kv_heads),
        num_decoder_layers=layers,
    )
    model = DecoderOnly(config)
    first, limits = jnp.full(rows, 3), jnp.full(rows, L)
    numbers = jnp.arange(rows)

    def write(params):
        cache = model.empty_cache(rows, beams, L)
        step = make_step_fn(model, params)
        if beams > 1:
            search = SearchConfig(beam_size=beams, max_new_tokens=L, eos=(1,))
            return beam_search(step, cache, first, limits, search)
        greedy = SamplingConfig(max_new_tokens=L, temperature=0)
        prompts = SamplerInputs(first, limits, numbers)
        return sample(step, cache, prompts, jax.random.key(0), greedy, eos=(1,))

    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((2, 5), np.int32))["params"]
    return jax.jit(write).lower(params).compile().as_text()


@pytest.mark.parametrize(
    ("num_kv_heads", "rows", "beams", "layers"),
    [(4, 3, 1, 1), (1, 1, 1, 2), (2, 1, 3, 2), (1, 2, 3, 1)],
)
def test_no_step_copies_keys_or_values(num_kv_heads, rows, beams, layers):
    text = compiled(num_kv_heads, rows, beams, layers)
    kept = rf"f32\[(?:\d+,)*(?:5,{L * beams}|{L * beams},5)\]"
    inside = [part for part in text.split("\n\n") if not part.lstrip().startswith("ENTRY")]
    assert re.search(rf"{kept}\S* (?:fusion|dynamic-update-slice)\(", text)
    copies = [line for part in inside for line in re.findall(rf".* = {kept}\S* copy\(.*", part)]
    assert not copies
