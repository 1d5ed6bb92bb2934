"""Times text generation next to PyTorch: `python -m experiments.benchmarks.generate`.

A GPT continues random prompts with a cache: one compiled program, and a loop over the layers of
the PyTorch reference model. Both have the same weights. Prints a table for each batch size and
writes RUNS/benchmarks/NAME.json.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.timing import (
    Case,
    MakeCase,
    TimingConfig,
    Timings,
    compiled_texts,
    load_torch,
    random_params,
    run_tables,
    text_case,
)
from experiments.harness import cli
from experiments.language_modelling.presets import shakespeare_char
from jaxformer import optional_dependencies
from jaxformer.config import Checked, Count, TransformerConfig, with_fields
from jaxformer.decoding import Prompts, SamplingConfig, sample
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines import make_step_fn


@dataclass(frozen=True)
class GenerateWork(Checked):
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


@dataclass(frozen=True)
class GenerateOptions(TimingConfig):
    """The generation, and its timing."""

    name: str = "generate"
    batch_sizes: tuple[int, ...] = (1, 16)
    """Batch sizes; each has a table of its own and replaces `work.batch_size`."""
    work: GenerateWork = GenerateWork()
    """The model and the prompts."""


PEERS = ("PyTorch loop", "PyTorch loop, one thread")


def main(options: GenerateOptions) -> None:
    """Measures, prints the tables and writes the file.

    Raises `RuntimeError` at the end if the texts differ.
    """
    tables = {
        f"{work.batch_size} x {work.new_tokens} tokens": cases(work)
        for work in (replace(options.work, batch_size=size) for size in options.batch_sizes)
    }
    for timings in run_tables(options, tables, PEERS).values():
        check_texts(timings)


def cases(work: GenerateWork) -> dict[str, MakeCase]:
    """The function that makes each case."""
    return {
        "jaxformer": partial(jax_sample, work),
        PEERS[0]: partial(torch_loop, work),
        PEERS[1]: partial(torch_loop, work, 1),
    }


def check_texts(timings: Timings) -> None:
    """Raises `RuntimeError` unless all cases wrote the same text."""
    checksums = {name: timing.metadata["checksum"] for name, timing in timings.measured.items()}
    if len(set(checksums.values())) > 1:
        raise RuntimeError(f"the texts differ, so the cases did not do the same work: {checksums}")


def params_of(config: TransformerConfig) -> Any:
    """The random parameters that both libraries compute with."""
    return random_params(DecoderOnly(config), np.zeros((1, 2), np.int32))


def jax_sample(work: GenerateWork) -> Case:
    """Prompt and `sample` as one compiled program.

    "bytes" are those that the steps read: parameters in the type of the model, and the cache.
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
        inputs = Prompts(prompts[:, -1], jnp.full(size, work.new_tokens), ids)
        return sample(make_step_fn(model, params), cache, inputs, rng, config).tokens[:, 0]

    shapes = jax.eval_shape(lambda params: init_cache(params, work.batch_size), params)
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    read = work.new_tokens * (weights * jnp.dtype(work.model.dtype).itemsize + cache_bytes)
    ids = np.arange(work.batch_size, dtype=np.int32)
    return compiled_texts(write, params, work.prompts(), ids, bytes=read)


def torch_loop(work: GenerateWork, threads: int | None = None) -> Case:
    """A loop over the layers of the reference model, eager, on `threads` (None: all).

    It copies no token to the host before the end of the text.
    """
    torch = load_torch(threads)
    model = reference_of(work.model).eval()
    prompts = torch.tensor(work.prompts(), dtype=torch.int64)
    cached = CachedGPT(torch, model, work.model, work.batch_size)

    @torch.inference_mode()
    def write() -> np.ndarray:
        text = torch.empty(work.batch_size, work.new_tokens, dtype=torch.int64)
        last = prompts
        for number in range(work.new_tokens):
            start = 0 if number == 0 else work.prompt_len + number - 1
            last = cached.step(last, start).argmax(-1, keepdim=True)
            text[:, number] = last[:, 0]
        return text.numpy().astype(np.int32)

    return text_case(write, threads=torch.get_num_threads())


def reference_of(config: TransformerConfig) -> Any:
    """The PyTorch reference model with `params_of`."""
    optional_dependencies.load("torch")
    from experiments.torch_reference import weights
    from experiments.torch_reference.gpt import GPT

    gpt = GPT(config)
    weights.load_params(params_of(config), gpt, config)
    return gpt


class CachedGPT:
    """The layers of the reference `model` with a cache that is allocated once.

    `step(tokens [B, T], start)` returns the logits [B, V] after the last of `tokens`, whose first
    position is `start`. Earlier tokens were given to earlier steps.
    """

    def __init__(self, torch: ModuleType, model: Any, config: TransformerConfig, batch_size: int):
        shape = batch_size, config.num_heads, config.max_len, config.key_size
        self._torch, self._model, self._heads = torch, model, config.num_heads
        self._positions = torch.arange(config.max_len)
        self._cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.blocks]

    def step(self, tokens: Any, start: int) -> Any:
        """The logits; several tokens at once are allowed only at `start` 0."""
        model, end = self._model, start + tokens.shape[1]
        x = model.embedding(tokens) + model.positions(self._positions[start:end])
        for block, cached in zip(model.blocks, self._cache, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x), cached, start)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        functional = self._torch.nn.functional
        return functional.linear(model.final_norm(x[:, -1]), model.embedding.weight)

    def _attend(self, attention: Any, x: Any, cached: tuple[Any, Any], start: int) -> Any:
        heads = attention.query_key_value(x).unflatten(-1, (3, self._heads, -1))
        query, *new = heads.permute(2, 0, 3, 1, 4)  # [B, N, T, H] each
        end = start + x.shape[1]
        for cache, fresh in zip(cached, new, strict=True):
            cache[:, :, start:end] = fresh
        key, value = (cache[:, :, :end] for cache in cached)
        attended = self._torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=x.shape[1] > 1
        )
        return attention.out(attended.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    cli.start(main, {"default": GenerateOptions()}, __doc__)
