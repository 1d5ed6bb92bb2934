"""The model of a run in the layout of transformers."""

import jax
import jax.numpy as jnp
import pytest

import jaxformer as jf
from experiments.harness.results.exporting import with_library_attention
from experiments.harness.training.first_contact import AutoAttention
from jaxformer.errors import ConfigError
from tests.pretrained.models import GPT2, inputs_of

pytest.importorskip("safetensors", reason="needs the extra experiments")


@pytest.mark.parametrize("has_head", [False, True])
def test_a_run_that_compares_and_times_its_kernels_is_exported(has_head, random_params, tmp_path):
    body = jf.DecoderOnly(GPT2, AutoAttention())
    model = jf.Classifier(body, 3) if has_head else body
    params = random_params(model, *inputs_of(model))
    if has_head:
        params["head"]["bias"] *= 0.0  # transformers has none
    with pytest.raises(ConfigError, match="AutoAttention"):
        jf.save_pretrained(tmp_path / "refused", model, params)
    jf.save_pretrained(tmp_path / "new", with_library_attention(model), params)
    found = jf.load(tmp_path / "new")
    assert jax.tree.map(jnp.shape, found.params) == jax.tree.map(jnp.shape, params)


def test_another_attention_function_of_a_run_stays():
    body = jf.DecoderOnly(GPT2, jf.ops.attention.blockwise)
    assert with_library_attention(body) is body
