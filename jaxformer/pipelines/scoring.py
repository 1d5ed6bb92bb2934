"""Log-probabilities of texts by a language model, of translations by a translator."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, overload

import jax
from jaxtyping import Array, Float, Int

from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.cross_entropy import token_log_probs
from jaxformer.pipelines.batching import group_by_length, next_power_of_two, pad_right
from jaxformer.pipelines.inputs import (
    Texts,
    check_id,
    check_inputs,
    check_lengths,
    unwrap_single,
)
from jaxformer.pipelines.pieces import place_params, run_divided
from jaxformer.pipelines.token_scores import read_token_scores
from jaxformer.pipelines.translation import encode_sources, target_ids, with_target_language
from jaxformer.pretrained.loaded import Loaded
from jaxformer.text.metrics import Likelihood, count_text


@overload
def score(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, stride: int | None = ...
) -> float: ...
@overload
def score(loaded: Loaded, texts: Texts, *, stride: int | None = ...) -> list[float]: ...
def score(loaded: Loaded, texts: str | Texts, *, stride: int | None = None) -> Any:
    """The log-probability (nats) of each text, or of the one text, after the vocabulary's BOS.

    Special tokens that the folder's own tokenizer puts around a text are counted with it. Without
    BOS the first token of a text is given and not counted. A longer text is read in windows of
    `max_len` tokens; each begins `stride` tokens after the one before (None: `max_len`), so that a
    token in a later window is predicted from at least `max_len - stride` tokens. Raises `DataError`
    for no text, `ConfigError` for a `stride` outside 1 to `max_len`, for another model and for a
    tokenizer that does not fit it.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcd"])
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> round(jf.score(jf.Loaded(model, params, tokenizer), "abc"), 4)  # -3 log 8
    -6.2383
    """
    return unwrap_single(texts, [-each.nats for each in _likelihoods(loaded, texts, stride)])


@overload
def score_with_details(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, stride: int | None = ...
) -> Likelihood: ...
@overload
def score_with_details(
    loaded: Loaded, texts: Texts, *, stride: int | None = ...
) -> list[Likelihood]: ...
def score_with_details(loaded: Loaded, texts: str | Texts, *, stride: int | None = None) -> Any:
    """The likelihood of each text, or of the one text: tokens, perplexity, bits per byte.

    Arguments and errors are as in `score`.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcd"])
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> likelihood = jf.score_with_details(jf.Loaded(model, params, tokenizer), "abc")
    >>> likelihood.tokens, round(likelihood.perplexity, 4)
    (3, 8.0)
    """
    return unwrap_single(texts, _likelihoods(loaded, texts, stride))


def _likelihoods(loaded: Loaded, texts: str | Texts, stride: int | None) -> list[Likelihood]:
    """The likelihood of each text."""
    lines, token_scores = read_token_scores(loaded, texts, stride)
    return [
        Likelihood(-math.fsum(scores.log_probs), len(scores.ids), *count_text([line]))
        for line, scores in zip(lines, token_scores, strict=True)
    ]


def score_pairs(
    loaded: Loaded,
    pairs: Iterable[tuple[str, str]],
    *settings: SearchConfig | TranslationOptions,
    **changes: Any,
) -> list[list[float]]:
    """The log-probability (nats) of each target token given the source, EOS included.

    Their sum is the log-probability of the target; a pair with a blank side has none. The ids are
    the ones that `translate` reads and writes: a token that each translation begins with
    (`forced_bos`) is scored as the others are. `settings` and `changes` replace settings of
    `loaded`, as in `translate`. Raises `DataError` for a side of more than `max_len` tokens,
    `ConfigError` for another model, for tokenizers, ids and settings that do not fit.

    >>> tokenizer = jf.train_characters(["abcd"])
    >>> config = jf.TransformerConfig(
    ...     8, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
    ... )
    >>> model = jf.EncoderDecoder(config)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3), int), jnp.ones((1, 3), int))
    >>> params = jax.tree.map(jnp.zeros_like, params["params"])  # all logits are 0
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> [[round(x, 3) for x in y] for y in jf.score_pairs(loaded, [("abc", "ab")])]  # log 8 each
    [[-2.079, -2.079, -2.079]]
    """
    pairs, tokenizer, target_tokenizer = check_inputs(loaded, pairs, EncoderDecoder)
    search, options = loaded.choose_settings(settings, changes, SearchConfig, TranslationOptions)
    search, options = with_target_language(target_tokenizer, search, options)
    model = loaded.model
    max_len = model.config.max_len
    params = place_params(loaded.params)
    for name in ("bos", "pad"):
        check_id(name, getattr(options, name), model.config.vocab_size)
    for number, pair in enumerate(pairs, 1):
        if isinstance(pair, str) or len(pair) != 2:
            raise DataError(f"pair {number} of {len(pairs)} must be (source, target): two strings")
    sources = encode_sources(model, [pair[0] for pair in pairs], tokenizer, search, options)
    targets = target_ids([pair[1] for pair in pairs], target_tokenizer, search, options)
    check_lengths(targets, max_len)
    results: list[list[float]] = [[] for _ in pairs]
    sides = zip(sources, targets, strict=True)
    lengths = [max(len(a), len(b)) if a and b else 0 for a, b in sides]
    for chosen, size in group_by_length(lengths, max_len, options.batch_size):
        batch = next_power_of_two(len(chosen))
        source = pad_right([sources[i] for i in chosen], batch, size, options.pad)
        target = pad_right([[options.bos, *targets[i]] for i in chosen], batch, size + 1)
        log_probs = run_divided(params, _pair_log_probs, model, source, target, pad=options.pad)
        for row, index in enumerate(chosen):
            results[index] = log_probs[row, : len(targets[index])].tolist()
    return results


@partial(jax.jit, static_argnames=("model", "pad"))
def _pair_log_probs(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    target: Int[Array, "B T+1"],
    *,
    pad: int,
) -> Float[Array, "B T"]:
    logits: Any = model.apply({"params": params}, source, target[:, :-1], source != pad)
    return token_log_probs(logits, target[:, 1:])
