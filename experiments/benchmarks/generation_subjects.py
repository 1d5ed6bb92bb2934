"""Text generation by one GPT: ours, and a loop over the layers of the PyTorch reference model.

Both cache keys and values, and have the same weights.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from experiments.benchmarks.environment import load_torch
from experiments.benchmarks.gpt_subjects import Sizes
from experiments.benchmarks.subprocesses import Subject
from jaxformer import optional_dependencies
from jaxformer.config import TransformerConfig, check_at_least
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Work:
    """The model, and the prompts that it continues to the end of its context."""

    model: Sizes = field(
        default_factory=lambda: Sizes(num_layers=6, num_heads=6, d_model=384, length=256)
    )
    """The model; its `rows` and its dropout are not used."""
    rows: int = 1
    """Number of prompts."""
    prompt: int = 16
    """Tokens in each prompt."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most likely token."""

    def __post_init__(self):
        check_at_least(self, 1, "rows", "prompt")
        check_at_least(self, 0.0, "temperature")
        if self.prompt >= self.model.length:
            raise ConfigError(
                f"prompt={self.prompt} fills the context of model.length={self.model.length} tokens"
                ": give a shorter prompt"
            )

    @property
    def new_tokens(self) -> int:
        """Returns the number of tokens that continue each prompt."""
        return self.model.length - self.prompt

    def prompts(self) -> np.ndarray:
        """Returns random tokens [B, P] int32."""
        rng = np.random.default_rng(1)
        return rng.integers(0, self.model.vocab_size, (self.rows, self.prompt), np.int32)


def weights(model: Sizes) -> Any:
    """Returns our parameters: normal numbers with standard deviation d_model^-0.5.

    They are larger than at the start of training, so that each layer changes the next token.
    """
    import jax

    from jaxformer.nn.models import DecoderOnly

    ids = np.zeros((1, 2), np.int32)
    gpt = DecoderOnly(model.config())
    shapes = jax.eval_shape(lambda: gpt.init(jax.random.key(0), ids))["params"]
    rng = np.random.default_rng(0)
    std = np.float32(model.d_model**-0.5)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        if path[-1].key == "scale":
            return np.ones(leaf.shape, np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * std

    return jax.tree_util.tree_map_with_path(draw, shapes)


Write = Callable[[], np.ndarray]
"""write() -> the tokens after the prompts, [B, `new_tokens`]."""


def _subject(write: Write, facts: dict[str, Any]) -> Subject:
    """Reports also a checksum of all tokens, which is the same for equal greedy texts."""
    text = write()
    begun = text[0, :4].tolist()
    checksum = f"{zlib.crc32(text.astype(np.int32).tobytes()):08x}"
    size = {"tokens": text.size, "begins": begun, "checksum": checksum}
    return Subject(write, facts | size)


def ours(work: Work) -> Subject:
    """Prompt and `sample` as one compiled program, with default compiler options."""
    import jax

    return _subject(our_write(work), {"device": jax.devices()[0].device_kind})


def our_write(work: Work) -> Write:
    """Ours, compiled; the batch is split into as many parts as `complete` uses."""
    import jax
    import jax.numpy as jnp

    from jaxformer.decoding import Prompts, SamplingConfig, sample
    from jaxformer.nn.models import DecoderOnly
    from jaxformer.pipelines import make_step_fn
    from jaxformer.runtime.concurrency import concurrency, concurrently

    model = DecoderOnly(work.model.config())
    params = jax.tree.map(jnp.asarray, weights(work.model))
    config = SamplingConfig(max_new_tokens=work.new_tokens, temperature=work.temperature)

    def write(params: Any, prompts: jax.Array, numbers: jax.Array, rng: jax.Array) -> jax.Array:
        rows, size = len(prompts), work.model.length
        cache = model.apply({"params": params}, rows, max_length=size, method="init_cache")
        if work.prompt > 1:
            before = prompts[:, None, :-1]
            _, cache = model.apply({"params": params}, before, cache, method="decode_step")
        inputs = Prompts(prompts[:, -1], jnp.full(rows, work.new_tokens), numbers)
        found = sample(make_step_fn(model, params), cache, inputs, rng, config)
        return found.tokens[:, 0]

    compiled, rng, count = jax.jit(write), jax.random.key(0), concurrency(params)
    rows, prompts = np.arange(work.rows, dtype=np.int32), work.prompts()
    parts = [(prompts[part], part) for part in np.array_split(rows, min(count, work.rows))]
    runs = [lambda part=part: np.asarray(compiled(params, *part, rng)) for part in parts]
    return lambda: np.concatenate(list(concurrently(runs, count)))


def torch_loop(work: Work, threads: int | None = None) -> Subject:
    """A loop over the layers of the reference model, eager, on `threads` (None: all)."""
    torch = load_torch(threads)
    return _subject(torch_write(work), {"threads": torch.get_num_threads()})


def torch_write(work: Work) -> Write:
    """PyTorch's loop; it copies no token to the host before the end of the text."""
    torch = optional_dependencies.load("torch")
    model = reference_of(work.model).eval()
    prompts = torch.tensor(work.prompts(), dtype=torch.int64)
    stepper = CachedGPT(torch, model, work.model.config(), work.rows)
    draws = torch.Generator().manual_seed(0)

    def pick(logits: Any) -> Any:
        if not work.temperature:
            return logits.argmax(-1, keepdim=True)
        return torch.multinomial((logits / work.temperature).softmax(-1), 1, generator=draws)

    @torch.inference_mode()
    def write() -> np.ndarray:
        text = torch.empty(work.rows, work.new_tokens, dtype=torch.int64)
        last = prompts
        for number in range(work.new_tokens):
            start = 0 if number == 0 else work.prompt + number - 1
            last = pick(stepper.step(last, start))
            text[:, number] = last[:, 0]
        return text.numpy().astype(np.int32)

    return write


def reference_of(model: Sizes) -> Any:
    """Returns the PyTorch reference model with our `weights`."""
    torch = optional_dependencies.load("torch")
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.weight_map import to_torch

    config = model.config()
    gpt = GPT(config)
    state = to_torch(weights(model), _table(config))
    gpt.load_state_dict({name: torch.tensor(np.ascontiguousarray(x)) for name, x in state.items()})
    return gpt


def _table(config: TransformerConfig) -> list[Any]:
    """Returns the weight table of `torch_reference.gpt.GPT` for a `config` without biases."""
    from experiments.torch_reference.weight_map import Entry, into_heads, linear, norm, out, same

    entries = [
        Entry("embedding.weight", ("embedding/table",), same()),
        Entry("positions.weight", ("decoder/positions/table",), same()),
        *norm("final_norm", "decoder/final_norm", bias=False),
    ]
    for number in range(config.num_decoder_layers):
        prefix, scope = f"blocks.{number}", f"decoder/blocks_{number}"
        parts = tuple(f"{scope}/attention/{part}/kernel" for part in ("query", "key", "value"))
        name = f"{prefix}.attention.query_key_value.weight"
        entries.append(Entry(name, parts, into_heads(config.num_heads, parts=3)))
        entries += out(
            f"{prefix}.attention.out", f"{scope}/attention/out", config.num_heads, bias=False
        )
        for part in ("up", "down"):
            names = f"{prefix}.feed_forward.{part}", f"{scope}/feed_forward/{part}"
            entries += linear(*names, bias=False)
        for part in ("attention_norm", "feed_forward_norm"):
            entries += norm(f"{prefix}.{part}", f"{scope}/{part}", bias=False)
    return entries


class CachedGPT:
    """The layers of the reference `model` with a cache that is allocated once.

    `step(tokens [B, T], start)` returns the logits [B, V] after the last of `tokens`, whose first
    position is `start`. Earlier tokens were given to earlier steps.
    """

    def __init__(self, torch: ModuleType, model: Any, config: TransformerConfig, rows: int):
        shape = rows, config.num_heads, config.max_len, config.key_size
        self._torch, self._model, self._heads = torch, model, config.num_heads
        self._positions = torch.arange(config.max_len)
        self._cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.blocks]

    def step(self, tokens: Any, start: int) -> Any:
        """Returns the logits; several tokens at once are allowed only at `start` 0."""
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
