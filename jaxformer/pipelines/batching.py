"""Shared by the pipelines: batches of few shapes, checks of texts, a model as step function."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, overload

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.decoding import LogitsConfig, Step
from jaxformer.distributed import strategy_of
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.pretrained.loaded import Loaded, Setting
from jaxformer.text.tokenizers import PAD, Template, Tokenizer, check_list
from jaxformer.training.parameters import flatten

Texts = Iterable[str]
Prompt = str | Sequence[int]
"""A text, or the ids of one, such as a chat template's with its special tokens."""
Prompts = Iterable[Prompt]
No = Literal[False]
Yes = Literal[True]

Plain = TypeVar("Plain")
Detailed = TypeVar("Detailed")

BATCH_SIZE = 64
"""The most texts in a batch."""

_HEADS = (Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier)
_MODELS = (DecoderOnly, EncoderDecoder, EncoderOnly, *_HEADS)
# The pipelines that take a model.
_PIPELINES: dict[type, str] = {
    DecoderOnly: "complete, score or embed",
    EncoderDecoder: "translate",
    EncoderOnly: "embed",
    MaskedLanguageModel: "fill_mask or embed",
}


class OneOrMany(Protocol[Plain, Detailed]):
    """The types of a pipeline: the result of one text or a list of those of several texts."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, loaded: Loaded, texts: str, /, *args: Setting, details: No = ..., **changes: Any
    ) -> Plain: ...
    @overload
    def __call__(
        self, loaded: Loaded, texts: Prompts, /, *args: Setting, details: No = ..., **changes: Any
    ) -> list[Plain]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, loaded: Loaded, texts: str, /, *args: Setting, details: Yes, **changes: Any
    ) -> Detailed: ...
    @overload
    def __call__(
        self, loaded: Loaded, texts: Prompts, /, *args: Setting, details: Yes, **changes: Any
    ) -> list[Detailed]: ...


def one_or_many(
    plain: type[Plain], detailed: type[Detailed]
) -> Callable[[Callable[..., Any]], OneOrMany[Plain, Detailed]]:
    """Declares the types of a pipeline's results, `plain` and with `details`."""
    return lambda function: cast(Any, function)


def unwrapped(model: Any) -> Any:
    """The model itself, or that inside `Ensemble` or `Patched`, also one in another."""
    return unwrapped(model.model) if hasattr(model, "model") else model


def check_inputs(loaded: Any, texts: Any, *kinds: type) -> tuple[list[Any], Tokenizer, Tokenizer]:
    """`texts`, one or several, in a list; the tokenizers of source and target.

    Raises `ConfigError` unless `loaded` is a `Loaded` with a model of `kinds` and tokenizers that
    fit it, `DataError` for no texts.
    """
    if isinstance(loaded, str | os.PathLike):
        raise ConfigError(f"the model is the path {str(loaded)!r}: call jf.load(path) first")
    if not isinstance(loaded, Loaded):
        raise ConfigError(
            f"the model is a {type(loaded).__name__}, but must be what jf.load(folder) returns, or "
            "jf.Loaded(model, params, tokenizer)"
        )
    check_model(loaded.model, *kinds)
    config = loaded.model.config
    source, target = loaded.require_tokenizer(), loaded.require_target_tokenizer()
    source.check_fits(config.source_vocab_size or config.vocab_size)
    target.check_fits(config.vocab_size)
    check_params(loaded.params)
    if isinstance(texts, str):
        return [texts], source, target
    check_list("texts", texts)
    texts = list(texts)
    if not texts:
        raise DataError("the list of texts is empty: give at least one text")
    return texts, source, target


def unwrap_single(texts: Any, results: Any) -> Any:
    """`results`, or the only one where `texts` is one string."""
    return results[0] if isinstance(texts, str) else results


def check_model(model: Any, *kinds: type) -> None:
    """Raises `ConfigError` for one of the package's models that is of none of `kinds`."""
    body = unwrapped(model)
    if not isinstance(body, nn.Module) or isinstance(body, _MODELS) and not isinstance(body, kinds):
        uses = _PIPELINES.get(type(body))
        raise ConfigError(
            f"the model has the class {type(body).__name__}, but this needs "
            f"{' or '.join(kind.__name__ for kind in kinds)}: "
            + (f"use {uses}, or load another model" if uses else "give a model of that class")
        )


def check_params(params: Any) -> None:
    """Raises `ConfigError`, with the parameter's name, for one that is no array of JAX or numpy."""
    wrong = [x for x in jax.tree.leaves(params) if not isinstance(getattr(x, "dtype", 0), np.dtype)]
    if wrong:
        name, leaf = next((name, x) for name, x in flatten(params).items() if x is wrong[0])
        raise ConfigError(
            f"the parameter {name} is a {type(leaf).__module__}.{type(leaf).__name__}, but "
            "must be an array of JAX or numpy: give the tree that model.init or jf.load returns"
        )


def check_texts(texts: Iterable[str]) -> list[str]:
    """`texts` in a list; `DataError` for what is no string."""
    texts = list(texts)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise DataError(
                f"text {number} of {len(texts)} is a {type(text).__name__}, but must be a string"
            )
    return texts


def check_id(name: str, token: int, vocab_size: int) -> None:
    """Raises `ConfigError` for a token id outside the model's vocabulary."""
    if not 0 <= token < vocab_size:
        raise ConfigError(
            f"{name}={token}, but the model's token ids are 0 to {vocab_size - 1}: give one of them"
        )


def suppressed_ids(
    model_config: TransformerConfig, tokenizer: Tokenizer, config: LogitsConfig
) -> tuple[int, ...]:
    """The ids that are never written: those of `config`, and those that the tokenizer lacks."""
    unknown = range(tokenizer.vocab_size, model_config.vocab_size)
    return *config.suppress_tokens, *(x for x in unknown if x not in config.suppress_tokens)


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raises `ConfigError` unless `value` is an integer from 1 to `most` (None: any)."""
    limits = "at least 1" if most is None else f"1 to {most}"
    if not isinstance(value, int | np.integer) or value < 1 or (most is not None and value > most):
        raise ConfigError(f"{name}={value!r}, but it must be an integer, {limits}")


def check_lengths(texts: Sequence[Sequence[int]], max_len: int) -> None:
    """Raises `DataError`, naming the first one, for texts of more than `max_len` tokens."""
    long = [i for i, ids in enumerate(texts) if len(ids) > max_len]
    if long:
        raise DataError(
            f"{len(long)} of {len(texts)} texts are longer than max_len={max_len} tokens, the "
            f"first is text {long[0] + 1} with {len(texts[long[0]])}: split them"
        )


def group_by_length(
    lengths: Sequence[int], max_len: int, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[list[int], int]]:
    """Indices of up to `batch_size` nonempty items of similar length, and their padded length."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    sizes = {i: padded_length(lengths[i], max_len) for i in order}
    for size in sorted(set(sizes.values())):
        bucket = [i for i in order if sizes[i] == size]
        for start in range(0, len(bucket), batch_size):
            yield bucket[start : start + batch_size], size


def padded_length(length: int, max_len: int) -> int:
    """16, 32, 64, ... or `max_len`: the least of them that is at least `length` <= `max_len`."""
    return min(max(16, next_power_of_two(length)), max_len)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pad_right(
    texts: Sequence[Sequence[int] | np.ndarray], batch: int, length: int, pad: int = PAD
) -> Int[np.ndarray, "B T"]:
    """`texts` as [batch, length] int32, padded at their ends and with empty rows."""
    padded = np.full((batch, length), pad, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def pad_with_mask(
    texts: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """`pad_right`, and a mask that is True at the tokens of the texts."""
    padding_mask = pad_right([[1] * len(text) for text in texts], batch, length) == 1
    return pad_right(texts, batch, length), padding_mask


def bos_eos(tokenizer: Tokenizer) -> Template:
    """BOS and EOS of the vocabulary, as far as it has them."""
    first, last = (() if x is None else (x,) for x in tokenizer.special[1:3])
    return Template(first, last)


def compile_piece(
    model: Any, params: Any, jitted: Any, *arrays: Any, **static: Any
) -> Callable[..., Any]:
    """`jitted(model, params, *arrays, **static)` as a function of `arrays`.

    For one device it is compiled here, under the caller's settings of JAX, which threads do not
    share.
    """
    devices = strategy_of(params)
    if devices.mesh.size > 1 or jax.config.jax_disable_jit:  # type: ignore[attr-defined]

        def run(*arrays: Any) -> Any:
            with devices.active():
                return jitted(model, params, *arrays, **static)

        return run
    # Shapes, because arrays remember the mesh of the program that made them: one program for all.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, arrays))
    with jax.default_device(devices.mesh.devices.flat[0]):
        compiled = jitted.lower(model, shapes[0], *shapes[1], **static).compile()
    return lambda *arrays: compiled(params, *arrays)


def run_divided(params: Any, jitted: Any, model: nn.Module, *arrays: Any, **static: Any) -> Any:
    """The results of `jitted(model, params, *arrays, **static)` on the devices that have `params`.

    Every process gives `arrays` whole; the mesh axis data divides their rows. The results are
    numpy arrays, perhaps with more rows at their ends.
    """
    devices = strategy_of(params)
    divided = devices.divide(arrays, axes=("data",))
    run = compile_piece(model, params, jitted, *divided, **static)
    return devices.gather(run(*divided))


def make_step_fn(model: nn.Module, params: Any) -> Step:
    """The decoder's step(tokens [B, W], cache) -> (logits [B, W, V], cache).

    It is a `jax.tree_util.Partial`: an input of compiled programs, with `params` as its leaves.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> step = jf.make_step_fn(model, params)
    >>> cache = model.apply({"params": params}, 2, max_length=5, method="init_cache")
    >>> logits, cache = jax.jit(step)(jnp.array([[1], [1]]), cache)
    >>> logits.shape, int(cache.length)  # [B, W, V]
    ((2, 1, 11), 1)
    """
    return jax.tree_util.Partial(_DecodeStep(model), params)


@dataclass(frozen=True)
class _DecodeStep:
    """Equal for equal models, so that JAX finds the program that it has compiled for one."""

    model: nn.Module

    def __call__(
        self, params: Any, tokens: Int[Array, "B W"], cache: Any
    ) -> tuple[Float[Array, "B W V"], Any]:
        variables = {"params": params}
        logits, cache = self.model.apply(variables, tokens[..., None], cache, method="decode_step")
        return logits[:, :, 0], cache
