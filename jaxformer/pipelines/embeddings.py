"""The vectors that a model gives to texts and their tokens."""

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer.errors import DataError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.pipelines.batching import (
    Texts,
    add_special_tokens,
    as_given,
    check_inputs,
    check_lengths,
    check_texts,
    compile_for,
    group_by_length,
    next_power_of_two,
    pad_with_mask,
    unwrapped,
)
from jaxformer.pretrained.loaded import Loaded


class TextEmbeddings(NamedTuple):
    """The T tokens of a text and their vectors."""

    tokens: list[str]
    """The tokens as the vocabulary writes them."""
    learned: Float[np.ndarray, "T D"]
    """Each token's vector in the embedding table, the same in every text."""
    contextual: Float[np.ndarray, "T D"]
    """Each token's last hidden state, which depends on the text."""
    mean: Float[np.ndarray, " D"]
    """The mean of `contextual` over the tokens."""


@overload
def embed(
    loaded: Loaded, texts: str | Texts, *, details: Literal[False] = ...
) -> Float[np.ndarray, "*texts D"]: ...
@overload
def embed(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, details: Literal[True]
) -> TextEmbeddings: ...
@overload
def embed(loaded: Loaded, texts: Texts, *, details: Literal[True]) -> list[TextEmbeddings]: ...
def embed(loaded: Loaded, texts: str | Texts, *, details: bool = False) -> Any:
    """The vector [D] of the one text or the vectors [n, D] of n texts: means over their tokens.

    With `details` the learned and the contextual vectors of each text's tokens. An encoder reads
    each text between BOS and EOS; their vectors are left out. Raises `DataError` for no text, a
    text without tokens or with more than `max_len`, `ConfigError` for another model and for a
    tokenizer that does not fit it.

    >>> from jaxformer.text.tokenizers import train_words
    >>> tokenizer = train_words(["a rose is a rose"], 10)
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> jf.embed(loaded, "a rose").shape, jf.embed(loaded, ["a rose", "a", "rose"]).shape
    ((8,), (3, 8))
    >>> text = jf.embed(loaded, "a rose is a rose", details=True)
    >>> text.tokens, text.contextual.shape
    ([' a', ' rose', ' is', ' a', ' rose'], (5, 8))
    >>> bool((text.learned[1] == text.learned[4]).all())  # one vector for each word
    True
    >>> bool((text.contextual[1] == text.contextual[4]).all())  # other words come before it
    False
    """
    lines, tokenizer, _ = check_inputs(loaded, texts, MaskedLanguageModel, EncoderOnly, DecoderOnly)
    check_texts(lines)
    model, params = loaded.model, loaded.params
    bare = tokenizer.encode_batch(lines)
    for number, ids in enumerate(bare, 1):
        if not ids:
            raise DataError(f"text {number} of {len(lines)} has no tokens: give it some text")
    causal = isinstance(unwrapped(model), DecoderOnly)
    whole = bare if causal else [add_special_tokens(ids, tokenizer) for ids in bare]
    first = 0 if causal or tokenizer.special.bos is None else 1
    check_lengths(whole, model.config.max_len)
    results: dict[int, TextEmbeddings] = {}
    for chosen, size in group_by_length([len(ids) for ids in whole], model.config.max_len):
        batch = next_power_of_two(len(chosen))
        tokens, padding_mask = pad_with_mask([whole[i] for i in chosen], batch, size)
        run = compile_for(params, _vectors, model, tokens, padding_mask)
        learned, contextual = run(tokens, padding_mask)
        for row, i in enumerate(chosen):
            inner = slice(first, first + len(bare[i]))
            names, states = [tokenizer.token(x) for x in bare[i]], contextual[row, inner]
            results[i] = TextEmbeddings(names, learned[row, inner], states, states.mean(axis=0))
    embeddings = [results[i] for i in range(len(lines))]
    if details:
        return as_given(texts, embeddings)
    return as_given(texts, np.stack([text.mean for text in embeddings]))


@partial(jax.jit, static_argnames="model")
def _vectors(
    model: nn.Module, params: Any, tokens: Int[Array, "B T"], padding_mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """The learned and the contextual vectors, float32."""

    def read(module):
        if isinstance(module, DecoderOnly):
            return module.embedding(tokens), module.hidden(tokens)
        encoder = module.encoder if isinstance(module, MaskedLanguageModel) else module
        return encoder.embedding(tokens), encoder(tokens, padding_mask).hidden

    vectors = model.apply({"params": params}, method=read)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), vectors)
