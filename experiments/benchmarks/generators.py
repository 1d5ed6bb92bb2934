"""Text of one GPT, a token at a time: ours, and a loop over the PyTorch twin's layers.

Both keep the keys and values of the tokens so far, and have the very same weights.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from experiments.benchmarks import pytorch
from experiments.benchmarks.children import Subject
from experiments.benchmarks.gpts import Sizes
from jaxformer import extras
from jaxformer.config import ConfigError, TransformerConfig, check_least


@dataclass(frozen=True)
class Work:
    """`rows` prompts of `prompt` tokens, each continued by as many as `model.length` has room for.

    At a `temperature` of 0 each token is the likeliest, else it is drawn. `model.rows` and its
    dropout have no meaning here.
    """

    model: Sizes = field(
        default_factory=lambda: Sizes(num_layers=6, num_heads=6, d_model=384, length=256)
    )
    rows: int = 1
    prompt: int = 16
    temperature: float = 0.0

    def __post_init__(self):
        check_least(self, 1, "rows", "prompt")
        check_least(self, 0.0, "temperature")
        if self.prompt >= self.model.length:
            raise ConfigError(
                f"prompt={self.prompt} tokens leave nothing to write of length={self.model.length}"
                ": give a shorter prompt"
            )

    @property
    def made(self) -> int:
        """How many tokens are made a row."""
        return self.model.length - self.prompt

    def prompts(self) -> np.ndarray:
        """Random tokens [B, P] int32."""
        rng = np.random.default_rng(1)
        return rng.integers(0, self.model.vocab_size, (self.rows, self.prompt), np.int32)


def weights(model: Sizes) -> Any:
    """Our tree of parameters: normal numbers of deviation 1 over the root of the inputs.

    Larger than what a training begins with, so that each layer changes which token comes next.
    """
    import jax

    from jaxformer.models import DecoderOnly

    ids = np.zeros((1, 2), np.int32)
    gpt = DecoderOnly(model.config())
    shapes = jax.eval_shape(lambda: gpt.init(jax.random.key(0), ids))["params"]
    rng = np.random.default_rng(0)
    deviation = np.float32(model.d_model**-0.5)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        if path[-1].key == "scale":
            return np.ones(leaf.shape, np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * deviation

    return jax.tree_util.tree_map_with_path(draw, shapes)


Write = Callable[[], np.ndarray]
"""write() -> what continues the prompts, [B, `made`]."""


def _subject(write: Write, facts: dict[str, Any]) -> Subject:
    """Told with it is a checksum of all tokens, which greedy texts of all rows should share."""
    text = write()
    begun = text[0, :4].tolist()
    checksum = f"{zlib.crc32(text.astype(np.int32).tobytes()):08x}"
    size = {"tokens": text.size, "begins": begun, "checksum": checksum}
    return Subject(write, facts | size)


def ours(work: Work) -> Subject:
    """Prompt and `sample` as one compiled program; untuned, as in the commands that sample."""
    import jax

    return _subject(our_write(work), {"device": jax.devices()[0].device_kind})


def our_write(work: Work) -> Write:
    """Ours, compiled; the rows in as many parts as `complete` makes of them."""
    import jax
    import jax.numpy as jnp

    from jaxformer.decoding import greedy, sample, temperature
    from jaxformer.generation import concurrency, concurrently, step_function
    from jaxformer.models import DecoderOnly

    model = DecoderOnly(work.model.config())
    params = jax.tree.map(jnp.asarray, weights(work.model))
    pick = temperature(work.temperature) if work.temperature else greedy

    def write(params: Any, prompts: jax.Array, numbers: jax.Array, rng: jax.Array) -> jax.Array:
        rows, size = len(prompts), work.model.length
        cache = model.apply({"params": params}, rows, length=size, method="start")
        if work.prompt > 1:
            before = prompts[:, None, :-1]
            _, cache = model.apply({"params": params}, before, cache, method="extend")
        found = sample(
            step_function(model, params),
            cache,
            prompts[:, -1],
            jnp.full(rows, work.made),
            rng,
            numbers,
            pick=pick,
            length=work.made,
            end=None,
        )
        return found.tokens[:, 0]

    compiled, rng, count = jax.jit(write), jax.random.key(0), concurrency(params)
    rows, prompts = np.arange(work.rows, dtype=np.int32), work.prompts()
    parts = [(prompts[part], part) for part in np.array_split(rows, min(count, work.rows))]
    runs = [lambda part=part: np.asarray(compiled(params, *part, rng)) for part in parts]
    return lambda: np.concatenate(list(concurrently(runs, count)))


def torch_loop(work: Work, threads: int | None = None) -> Subject:
    """A loop over the twin's layers, eager, on `threads` (None: all processors)."""
    torch = pytorch.load(threads)
    return _subject(torch_write(work), {"threads": torch.get_num_threads()})


def torch_write(work: Work) -> Write:
    """PyTorch's loop: nothing in it waits for a token's number before the text is done."""
    torch = extras.load("torch")
    model = twin_of(work.model).eval()
    prompts = torch.tensor(work.prompts(), dtype=torch.int64)
    stepper = CachedGPT(torch, model, work.model.config(), work.rows)
    draws = torch.Generator().manual_seed(0)

    def pick(logits: Any) -> Any:
        if not work.temperature:
            return logits.argmax(-1, keepdim=True)
        return torch.multinomial((logits / work.temperature).softmax(-1), 1, generator=draws)

    @torch.inference_mode()
    def write() -> np.ndarray:
        text = torch.empty(work.rows, work.made, dtype=torch.int64)
        last = prompts
        for number in range(work.made):
            start = 0 if number == 0 else work.prompt + number - 1
            last = pick(stepper.step(last, start))
            text[:, number] = last[:, 0]
        return text.numpy().astype(np.int32)

    return write


def twin_of(model: Sizes) -> Any:
    """The PyTorch twin with our `weights`."""
    torch = extras.load("torch")
    from experiments.pytorch_twin.gpt import GPT
    from experiments.pytorch_twin.tables import to_theirs

    config = model.config()
    gpt = GPT(config)
    state = to_theirs(weights(model), _table(config))
    gpt.load_state_dict({name: torch.tensor(np.ascontiguousarray(x)) for name, x in state.items()})
    return gpt


def _table(config: TransformerConfig) -> list[Any]:
    """The rows of `experiments.pytorch_twin.gpt.GPT` of a `config` without biases."""
    from experiments.pytorch_twin.tables import Row, into_heads, linear, norm, out, same

    rows = [
        Row("embedding.weight", ("embedding/table",), same()),
        Row("positions.weight", ("decoder/positions/table",), same()),
        *norm("final_norm", "decoder/final_norm", bias=False),
    ]
    for number in range(config.num_decoder_layers):
        theirs, ours = f"blocks.{number}", f"decoder/blocks_{number}"
        parts = tuple(f"{ours}/attention/{part}/kernel" for part in ("query", "key", "value"))
        name = f"{theirs}.attention.query_key_value.weight"
        rows.append(Row(name, parts, into_heads(config.num_heads, parts=3)))
        rows += out(
            f"{theirs}.attention.out", f"{ours}/attention/out", config.num_heads, bias=False
        )
        for part in ("up", "down"):
            names = f"{theirs}.feed_forward.{part}", f"{ours}/feed_forward/{part}"
            rows += linear(*names, bias=False)
        for part in ("attention_norm", "feed_forward_norm"):
            rows += norm(f"{theirs}.{part}", f"{ours}/{part}", bias=False)
    return rows


class CachedGPT:
    """The layers of the twin `model` over keys and values that are allocated once.

    `step(tokens [B, T], start)` is the logits [B, V] after the last of `tokens`, which stand at
    `start` and the places behind it; what stood before them was given to earlier steps.
    """

    def __init__(self, torch: ModuleType, model: Any, config: TransformerConfig, rows: int):
        shape = rows, config.num_heads, config.max_len, config.key_size
        self._torch, self._model, self._heads = torch, model, config.num_heads
        self._positions = torch.arange(config.max_len)
        self._past = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.blocks]

    def step(self, tokens: Any, start: int) -> Any:
        """The logits; several tokens at once only from `start` 0."""
        model, end = self._model, start + tokens.shape[1]
        x = model.embedding(tokens) + model.positions(self._positions[start:end])
        for block, past in zip(model.blocks, self._past, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x), past, start)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        functional = self._torch.nn.functional
        return functional.linear(model.final_norm(x[:, -1]), model.embedding.weight)

    def _attend(self, attention: Any, x: Any, past: tuple[Any, Any], start: int) -> Any:
        heads = attention.query_key_value(x).unflatten(-1, (3, self._heads, -1))
        query, *new = heads.permute(2, 0, 3, 1, 4)  # [B, N, T, H] each
        end = start + x.shape[1]
        for cache, fresh in zip(past, new, strict=True):
            cache[:, :, start:end] = fresh
        key, value = (cache[:, :, :end] for cache in past)
        gathered = self._torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=x.shape[1] > 1
        )
        return attention.out(gathered.transpose(1, 2).flatten(2))
