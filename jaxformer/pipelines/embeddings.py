"""The vectors that a model gives to texts and their tokens."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pipelines.batching import next_power_of_two, pad_with_mask
from jaxformer.pipelines.inputs import (
    Texts,
    bos_eos,
    check_inputs,
    check_lengths,
    check_texts,
    unwrap_single,
    unwrapped,
)
from jaxformer.pipelines.pieces import place_params, run_divided
from jaxformer.pretrained.loaded import Loaded
from jaxformer.pretrained.sentence_modules import SentenceOptions
from jaxformer.text.tokenizers import Template, Tokenizer

# As many rows keep the arrays of a layer in a CPU's cache.
_ROWS = 32

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class TextEmbeddings(NamedTuple):
    """The T tokens of a text, its special tokens among them, and their vectors."""

    tokens: list[str]
    """The tokens as the vocabulary writes them."""
    learned: Float[np.ndarray, "T D"]
    """Each token's vector in the embedding table, the same in every text."""
    contextual: Float[np.ndarray, "T D"]
    """Each token's last hidden state, which depends on the text."""
    vector: Float[np.ndarray, " D_out"]
    """The text's vector, as `embed` gives it."""


def embed(
    loaded: Loaded,
    texts: str | Texts,
    *,
    pooling: Pooling | None = None,
    prompt: str | None = None,
) -> Float[np.ndarray, "*texts D_out"]:
    """The vector [D] of the one text or the vectors [n, D] of n texts.

    A folder of sentence-transformers (with modules.json) gives that library's vectors: its pooling,
    dense layers and division by the length, its `prompt` by name before each text, and only the
    first `max_seq_length` tokens of a long text, with a warning. With another model a text's vector
    is the mean of the vectors of its tokens, special tokens among them, or what `pooling` says, by
    sentence-transformers' names: the first token (cls), the last one, the largest numbers, ...

    Raises `DataError` for no text, a text without tokens or with more than `max_len`, `ConfigError`
    for another model, for a tokenizer that does not fit it, for an unknown prompt and for modules
    that are not supported.

    >>> from jaxformer.text.tokenizers import train_words
    >>> tokenizer = train_words(["a rose is a rose"], 10)
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> jf.embed(loaded, "a rose").shape, jf.embed(loaded, ["a rose", "a", "rose"]).shape
    ((8,), (3, 8))
    """
    rows, skipped, _, options = _read_texts(loaded, texts, pooling, prompt)
    params = place_params(loaded.params)
    vectors: list[Any] = [None] * len(rows)
    for chosen, arrays in _batches_of_arrays(rows, skipped, loaded.model.config.max_len):
        pooled = run_divided(params, _text_vectors, loaded.model, *arrays, pooling=options.pooling)
        for row, i in enumerate(chosen):
            vectors[i] = pooled[row]
    return unwrap_single(texts, _apply_layers(vectors, options))


@overload
def embed_with_details(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, pooling: Pooling | None = ..., prompt: str | None = ...
) -> TextEmbeddings: ...
@overload
def embed_with_details(
    loaded: Loaded, texts: Texts, *, pooling: Pooling | None = ..., prompt: str | None = ...
) -> list[TextEmbeddings]: ...
def embed_with_details(
    loaded: Loaded,
    texts: str | Texts,
    *,
    pooling: Pooling | None = None,
    prompt: str | None = None,
) -> Any:
    """The vector of each text, or of the one text, with the vectors of its tokens.

    Arguments and errors are as in `embed`.

    >>> from jaxformer.text.tokenizers import train_words
    >>> tokenizer = train_words(["a rose is a rose"], 10)
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> text = jf.embed_with_details(jf.Loaded(model, params, tokenizer), "a rose is a rose")
    >>> text.tokens, text.contextual.shape
    ([' a', ' rose', ' is', ' a', ' rose'], (5, 8))
    >>> bool((text.learned[1] == text.learned[4]).all())  # one vector for each word
    True
    >>> bool((text.contextual[1] == text.contextual[4]).all())  # other words come before it
    False
    """
    rows, skipped, tokenizer, options = _read_texts(loaded, texts, pooling, prompt)
    params = place_params(loaded.params)
    vectors: list[Any] = [None] * len(rows)
    learned, contextual = vectors.copy(), vectors.copy()
    for chosen, arrays in _batches_of_arrays(rows, skipped, loaded.model.config.max_len):
        pooled, of_table, of_context = run_divided(
            params, _text_and_token_vectors, loaded.model, *arrays, pooling=options.pooling
        )
        for row, i in enumerate(chosen):
            vectors[i] = pooled[row]
            learned[i] = of_table[row, : len(rows[i])]
            contextual[i] = of_context[row, : len(rows[i])]
    results = [
        TextEmbeddings([tokenizer.token(index) for index in ids], *vectors_of_text)
        for ids, *vectors_of_text in zip(
            rows, learned, contextual, _apply_layers(vectors, options), strict=True
        )
    ]
    return unwrap_single(texts, results)


def _read_texts(
    loaded: Loaded, texts: str | Texts, pooling: Pooling | None, prompt: str | None
) -> tuple[list[list[int]], int, Tokenizer, SentenceOptions]:
    """The ids of each text, how many first ones are not pooled, the tokenizer, the options."""
    lines, tokenizer, _ = check_inputs(loaded, texts, MaskedLanguageModel, EncoderOnly, DecoderOnly)
    changes: dict[str, Any] = {}
    if pooling is not None:
        changes["pooling"] = (pooling,)
    if prompt is not None:
        changes["prompt"] = prompt
    (options,) = loaded.choose_settings((), changes, SentenceOptions)
    template = tokenizer.template
    if template is None:
        causal = isinstance(unwrapped(loaded.model), DecoderOnly)
        template = Template() if causal else bos_eos(tokenizer)
    rows, skipped = _input_ids(check_texts(lines), tokenizer, options, template)
    check_lengths(rows, loaded.model.config.max_len)
    return rows, skipped, tokenizer, options


def _apply_layers(vectors: list[Any], options: SentenceOptions) -> Float[np.ndarray, "n D_out"]:
    """The texts' vectors after the folder's further modules."""
    stacked = np.stack(vectors)
    for layer in options.layers:
        stacked = layer(stacked)
    return stacked


def _batches_of_arrays(
    rows: list[list[int]], skipped: int, max_len: int
) -> Iterator[tuple[list[int], tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """The indices of a batch's texts; their ids, and where they are real and where pooled."""
    for chosen, size in _batches([len(ids) for ids in rows], max_len):
        batch = next_power_of_two(len(chosen))
        tokens, real = pad_with_mask([rows[i] for i in chosen], batch, size)
        yield chosen, (tokens, real, real & (np.arange(size) >= skipped))


def _batches(lengths: list[int], max_len: int) -> Iterator[tuple[list[int], int]]:
    """Indices of up to `_ROWS` texts of similar length, and their padded length; the longest first.

    A batch is as long as its longest text or up to a quarter longer, so that shapes are few, and no
    text is less than half as long.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        end = start + 1
        while end < min(start + _ROWS, len(order)) and lengths[order[end]] * 2 >= longest - 16:
            end += 1
        step = max(8, next_power_of_two(longest) // 8)
        yield order[start:end], min(-(-longest // step) * step, max_len)
        start = end


def _input_ids(
    lines: list[str], tokenizer: Tokenizer, options: SentenceOptions, template: Template
) -> tuple[list[list[int]], int]:
    """The ids that the model reads of each line, and how many first ones are not pooled."""
    before = ""
    if options.prompt is not None:
        if options.prompt not in options.prompts:
            known = ", ".join(options.prompts) or "none: write it before each text"
            raise ConfigError(f"prompt={options.prompt!r}, but the folder's prompts are {known}")
        before = options.prompts[options.prompt]
    texts = [before + line for line in lines]
    if options.lowercase:  # each character alone, as the library tokenizers does
        texts = ["".join(map(str.lower, text)) for text in texts]
    rows = tokenizer.encode_inputs(texts, template)
    most = max(map(len, rows)) if options.max_tokens is None else options.max_tokens
    long = sum(len(ids) > most for ids in rows)
    if long:
        warnings.warn(
            f"{long} of {len(rows)} texts have more than the {most} tokens that the folder's "
            "max_seq_length allows: the rest of them is not read",
            stacklevel=4,
        )
        kept = max(most - len(template.last), len(template.first))
        rows = [ids if len(ids) <= most else [*ids[:kept], *template.last] for ids in rows]
    for number, ids in enumerate(rows, 1):
        if not ids:
            raise DataError(f"text {number} of {len(rows)} has no tokens: give it some text")
    if options.pools_prompt or not before:
        return rows, 0
    return rows, len(template.first) + len(tokenizer.encode(before))


@partial(jax.jit, static_argnames=("model", "pooling"))
def _text_vectors(
    model: nn.Module,
    params: Any,
    tokens: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    counted: Bool[Array, "B T"],
    *,
    pooling: tuple[str, ...],
) -> Float[Array, "B D_out"]:
    """The pooled vectors of texts."""
    _, hidden = _token_vectors(model, params, tokens, real)
    return _pool_by(hidden, counted, pooling)


@partial(jax.jit, static_argnames=("model", "pooling"))
def _text_and_token_vectors(
    model: nn.Module,
    params: Any,
    tokens: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    counted: Bool[Array, "B T"],
    *,
    pooling: tuple[str, ...],
) -> tuple[Float[Array, "B D_out"], Float[Array, "B T D"], Float[Array, "B T D"]]:
    """The pooled vectors of texts, the learned and the contextual ones of their tokens."""
    learned, hidden = _token_vectors(model, params, tokens, real)
    return _pool_by(hidden, counted, pooling), learned, hidden


def _token_vectors(
    model: nn.Module, params: Any, tokens: Int[Array, "B T"], real: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """The learned and the contextual vectors of tokens, in float32."""

    def read(module):
        if isinstance(module, DecoderOnly):
            return module.embedding(tokens), module.hidden(tokens)
        encoder = module.encoder if isinstance(module, MaskedLanguageModel) else module
        return encoder.embedding(tokens), encoder(tokens, real).hidden

    vectors: Any = model.apply({"params": params}, method=read)
    learned, hidden = vectors
    return learned.astype(jnp.float32), hidden.astype(jnp.float32)


def _pool_by(
    hidden: Float[Array, "B T D"], counted: Bool[Array, "B T"], pooling: tuple[str, ...]
) -> Float[Array, "B D_out"]:
    """The vectors of texts by each mode of `pooling`, one beside the other."""
    return jnp.concatenate([_pool(hidden, counted, mode) for mode in pooling], axis=-1)


def _pool(
    hidden: Float[Array, "B T D"], counted: Bool[Array, "B T"], mode: str
) -> Float[Array, "B D"]:
    """One vector of those that are `counted`, as sentence-transformers' module Pooling does."""
    length = counted.shape[1]
    if mode in ("cls", "lasttoken"):
        first = jnp.argmax(counted, axis=1)
        last = length - 1 - jnp.argmax(counted[:, ::-1], axis=1)
        place = first if mode == "cls" else last
        return jnp.take_along_axis(hidden, place[:, None, None], axis=1)[:, 0]
    if mode == "max":
        return jnp.max(jnp.where(counted[..., None], hidden, -jnp.inf), axis=1)
    weights = counted.astype(jnp.float32)
    if mode == "weightedmean":
        weights *= jnp.arange(1, length + 1)[None]
    total = jnp.einsum("bt,btd->bd", weights, jnp.where(counted[..., None], hidden, 0.0))
    count = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-9)
    return total / (jnp.sqrt(count) if mode == "mean_sqrt_len_tokens" else count)
