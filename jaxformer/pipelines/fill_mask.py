"""Predictions of the tokens behind the masks of a text."""

from functools import partial
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.errors import DataError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.pipelines.batching import (
    group_by_length,
    next_power_of_two,
    pad_right,
    pad_with_mask,
)
from jaxformer.pipelines.inputs import (
    Texts,
    bos_eos,
    check_count,
    check_inputs,
    check_lengths,
    check_texts,
    unwrap_single,
)
from jaxformer.pipelines.pieces import place_params, run_divided
from jaxformer.pretrained.loaded import Loaded
from jaxformer.text.tokenizers import Tokenizer


class MaskPrediction(NamedTuple):
    """A token that may replace a mask."""

    token: str
    """The token as the vocabulary writes it."""
    text: str
    """The token's text."""
    probability: float
    """Its probability."""


@overload
def fill_mask(loaded: Loaded, texts: str) -> str: ...  # type: ignore[overload-overlap]
@overload
def fill_mask(loaded: Loaded, texts: Texts) -> list[str]: ...
def fill_mask(loaded: Loaded, texts: str | Texts) -> Any:
    """Each text, or the one text, with the text of the most likely token in place of each mask.

    A mask is written as the vocabulary's mask token, "<mask>" or "[MASK]", and stands for one
    token. Spaces that the vocabulary's mask takes with it are no tokens. Raises `DataError` for no
    text, a text without a mask or with more than `max_len` tokens and for a vocabulary without a
    mask token, `ConfigError` for another model and for a tokenizer that does not fit it.

    >>> from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, train_words
    >>> tokenizer = train_words(["a rose is a rose"], 10, special_tokens=MASKED_SPECIAL_TOKENS)
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.MaskedLanguageModel(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> filled = jf.fill_mask(jf.Loaded(model, params, tokenizer), "a <mask> is")
    >>> filled.startswith("a "), filled.endswith(" is")
    (True, True)
    """
    lines, predictions, mask = _predict_masks(loaded, texts, count=1)
    filled = [_filled(*each, mask) for each in zip(lines, predictions, strict=True)]
    return unwrap_single(texts, filled)


@overload
def fill_mask_with_details(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, count: int = ...
) -> list[list[MaskPrediction]]: ...
@overload
def fill_mask_with_details(
    loaded: Loaded, texts: Texts, *, count: int = ...
) -> list[list[list[MaskPrediction]]]: ...
def fill_mask_with_details(loaded: Loaded, texts: str | Texts, *, count: int = 5) -> Any:
    """The `count` most likely tokens for each mask of each text, or of the one text, best first.

    Masks and errors are as in `fill_mask`.

    >>> from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, train_words
    >>> tokenizer = train_words(["a rose is a rose"], 10, special_tokens=MASKED_SPECIAL_TOKENS)
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.MaskedLanguageModel(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> ((best, *others),) = jf.fill_mask_with_details(loaded, "a <mask> is")
    >>> round(best.probability, 4), len(others)  # each of the 8 tokens is as likely
    (0.125, 4)
    """
    _, predictions, _ = _predict_masks(loaded, texts, count)
    return unwrap_single(texts, predictions)


def _predict_masks(
    loaded: Loaded, texts: str | Texts, count: int
) -> tuple[list[str], list[list[list[MaskPrediction]]], str]:
    """The texts, the `count` best tokens for each mask of each of them, and the mask's name."""
    lines, tokenizer, _ = check_inputs(loaded, texts, MaskedLanguageModel)
    check_texts(lines)
    model = loaded.model
    params = place_params(loaded.params)
    max_len = model.config.max_len
    check_count("count", count)
    mask = _mask_id(tokenizer)
    ids = tokenizer.encode_inputs(lines, bos_eos(tokenizer))
    positions = [np.flatnonzero(np.array(x) == mask) for x in ids]
    for number, places in enumerate(positions, 1):
        if not places.size:
            raise DataError(
                f"text {number} has no mask: write {tokenizer.token(mask)} where a token is missing"
            )
    check_lengths(ids, max_len)
    results: list[list[list[MaskPrediction]]] = [[] for _ in lines]
    for chosen, size in group_by_length([len(x) for x in ids], max_len):
        batch = next_power_of_two(len(chosen))
        tokens, padding_mask = pad_with_mask([ids[i] for i in chosen], batch, size)
        most = next_power_of_two(max(len(positions[i]) for i in chosen))
        masked_positions = pad_right([positions[i] for i in chosen], batch, most)
        probabilities, predicted = run_divided(
            params,
            _predict,
            model,
            tokens,
            padding_mask,
            masked_positions,
            count=count,
            known=tokenizer.vocab_size,
        )
        for row, i in enumerate(chosen):
            results[i] = [
                _predictions(predicted[row, k], probabilities[row, k], tokenizer)
                for k in range(len(positions[i]))
            ]
    return lines, results, tokenizer.token(mask)


@partial(jax.jit, static_argnames=("model", "count", "known"))
def _predict(
    model: MaskedLanguageModel,
    params: Any,
    tokens: Int[Array, "B T"],
    padding_mask: Bool[Array, "B T"],
    masked_positions: Int[Array, "B P"],
    *,
    count: int,
    known: int,
) -> tuple[Float[Array, "B P count"], Int[Array, "B P count"]]:
    """The `count` largest probabilities at each mask, and their token ids."""
    variables = {"params": params}
    output: Any = model.apply(variables, tokens, padding_mask, None, masked_positions)
    # A model may have more ids than its tokenizer.
    probabilities = jax.nn.softmax(output.logits[..., :known], axis=-1)
    return jax.lax.top_k(probabilities, min(count, known))


def _filled(text: str, masks: list[list[MaskPrediction]], mask: str) -> str:
    first, *parts = text.split(mask)
    texts = (best.text.strip() + part for (best, *_), part in zip(masks, parts, strict=True))
    return first + "".join(texts)


def _mask_id(tokenizer: Tokenizer) -> int:
    if tokenizer.special.mask is None:
        raise DataError(
            "the vocabulary has no mask token: give the tokenizer of a masked language model"
        )
    return tokenizer.special.mask


def _predictions(
    ids: np.ndarray, probabilities: np.ndarray, tokenizer: Tokenizer
) -> list[MaskPrediction]:
    texts = tokenizer.decode_batch(ids[:, None])
    rows = zip(ids.tolist(), texts, probabilities.tolist(), strict=True)
    return [MaskPrediction(tokenizer.token(i), text, share) for i, text, share in rows]
