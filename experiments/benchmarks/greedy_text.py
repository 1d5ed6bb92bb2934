"""The greedy continuation of random prompts by a GPT: the work, and a case to time.

`experiments.benchmarks.device` times it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.text_cases import compiled_texts, random_params
from experiments.benchmarks.timing import Case
from experiments.language_modelling.presets import shakespeare_char
from jaxformer.config import Checked, Count, TransformerConfig, with_fields
from jaxformer.decoding import SamplerInputs, SamplingConfig, sample
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines import make_step_fn


@dataclass(frozen=True)
class GreedyText(Checked):
    """The model, and the prompts that it continues to the end of its context."""

    model: TransformerConfig = with_fields(
        shakespeare_char.model, {"dropout_rate": 0.0, "attention.dropout_rate": 0.0}
    )
    """Sizes of the model; texts are as long as its max_len."""
    batch_size: Count = 1
    """Number of prompts."""
    prompt_len: Count = 16
    """Tokens of each prompt."""

    @property
    def new_tokens(self) -> int:
        """The number of tokens that continue each prompt."""
        return self.model.max_len - self.prompt_len

    def prompts(self) -> np.ndarray:
        """Random tokens [B, P] int32."""
        rng = np.random.default_rng(1)
        return rng.integers(0, self.model.vocab_size, (self.batch_size, self.prompt_len), np.int32)


def params_of(config: TransformerConfig) -> Any:
    """The random parameters of a model of these sizes."""
    return random_params(DecoderOnly(config), np.zeros((1, 2), np.int32))


def jax_sample(work: GreedyText) -> Case:
    """Prompt and `sample` as one compiled program.

    "bytes" counts what the steps read: parameters in the type of the model, and the cache.
    """
    model = DecoderOnly(work.model)
    params = jax.tree.map(jnp.asarray, params_of(work.model))
    config = SamplingConfig(max_new_tokens=work.new_tokens, temperature=0.0)

    def init_cache(params: Any, size: int) -> Any:
        length = work.model.max_len
        return model.apply({"params": params}, size, max_length=length, method="init_cache")

    def write(params: Any, prompts: jax.Array, ids: jax.Array) -> jax.Array:
        size, rng = len(prompts), jax.random.key(0)
        cache = init_cache(params, size)
        if work.prompt_len > 1:
            before = prompts[:, None, :-1]
            _, cache = model.apply({"params": params}, before, cache, method="decode_step")
        inputs = SamplerInputs(prompts[:, -1], jnp.full(size, work.new_tokens), ids)
        return sample(make_step_fn(model, params), cache, inputs, rng, config).tokens[:, 0]

    shapes = jax.eval_shape(lambda params: init_cache(params, work.batch_size), params)
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    read = work.new_tokens * (weights * jnp.dtype(work.model.dtype).itemsize + cache_bytes)
    ids = np.arange(work.batch_size, dtype=np.int32)
    return compiled_texts(write, params, work.prompts(), ids, bytes=read)
