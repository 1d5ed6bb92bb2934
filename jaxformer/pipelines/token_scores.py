"""Log-probabilities of the tokens of texts, and of continuations of one context."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding import take_rows
from jaxformer.errors import DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops.cross_entropy import token_log_probs
from jaxformer.pipelines.batching import next_power_of_two, pad_right
from jaxformer.pipelines.decoding_weights import prepare
from jaxformer.pipelines.inputs import (
    Prompt,
    Texts,
    bos_eos,
    check_count,
    check_inputs,
    check_texts,
    unwrap_single,
)
from jaxformer.pipelines.joined_batches import Batch, join_batches
from jaxformer.pipelines.pieces import place_params, run_divided
from jaxformer.pipelines.prompts import check_ids
from jaxformer.pretrained.loaded import Loaded
from jaxformer.text.tokenizers import Template, Tokenizer

_LONG = 256
"""Up to this many tokens a text is padded to a power of two."""
_MULTIPLE = 128
"""Longer texts are padded to a multiple of this: a further program is compiled in less time than
more padding would take."""


class TokenScores(NamedTuple):
    """Tokens of a text and what the model says of each of them, after the tokens before it."""

    ids: list[int]
    """The ids of the tokens."""
    log_probs: list[float]
    """Their log-probabilities (nats)."""
    most_likely: list[bool]
    """Whether no other token was more likely at its place."""


@overload
def score_tokens(  # type: ignore[overload-overlap]
    loaded: Loaded, texts: str, *, stride: int | None = ...
) -> TokenScores: ...
@overload
def score_tokens(
    loaded: Loaded, texts: Texts, *, stride: int | None = ...
) -> list[TokenScores]: ...
def score_tokens(loaded: Loaded, texts: str | Texts, *, stride: int | None = None) -> Any:
    """The log-probability (nats) of each token of each text, or of the one text.

    The tokens are those that `score` counts, whose arguments and errors it has: their sum is the
    score of the text.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcd"])
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> scores = jf.score_tokens(jf.Loaded(model, params, tokenizer), "ad")
    >>> scores.ids, [round(x, 4) for x in scores.log_probs]  # -log 8
    ([4, 7], [-2.0794, -2.0794])
    """
    _, scores = read_token_scores(loaded, texts, stride)
    return unwrap_single(texts, scores)


def read_token_scores(
    loaded: Loaded, texts: str | Texts, stride: int | None
) -> tuple[list[str], list[TokenScores]]:
    """The texts in a list, and the scores of their tokens."""
    lines, tokenizer, _ = check_inputs(loaded, texts, DecoderOnly)
    check_texts(lines)
    max_len = loaded.model.config.max_len
    step = max_len if stride is None else stride
    check_count("stride", step, max_len)
    ids = tokenizer.encode_inputs(lines, Template(bos_eos(tokenizer).first))
    windows = [(i, *window) for i, x in enumerate(ids) for window in _windows(x, max_len, step)]
    params = place_params(loaded.params)
    scored = _score_windows(loaded.model, params, [(window, known) for _, window, known in windows])
    by_line = [TokenScores([], [], []) for _ in lines]
    for (i, _, _), scores in zip(windows, scored, strict=True):
        by_line[i].ids.extend(scores.ids)
        by_line[i].log_probs.extend(scores.log_probs)
        by_line[i].most_likely.extend(scores.most_likely)
    return lines, by_line


def score_continuations(
    loaded: Loaded, questions: Iterable[tuple[Prompt, Sequence[Prompt]]]
) -> list[list[TokenScores]]:
    """The log-probability (nats) of each token of the continuations of contexts.

    A question is (context, continuations), each a text or the ids of one; the result has a list
    for each question, with the scores of each of its continuations. The context of several
    continuations is read once. A text stands after the vocabulary's BOS, if it has one; an empty
    context is BOS alone. The ids of a continuation that is a text after a context that is a text
    are the ids of the two together after as many as the context has: white space between them
    belongs to the continuation.

    Raises `DataError` for no question, for an empty continuation, for an empty context without BOS,
    and where context and continuation have more than `max_len` + 1 tokens together; `ConfigError`
    for another model and for a tokenizer that does not fit it.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcd"])
    >>> config = jf.TransformerConfig(8, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> ((one, two),) = jf.score_continuations(loaded, [("ab", ["cd", "d"])])
    >>> len(one.ids), len(two.ids)
    (2, 1)
    >>> abs(sum(one.log_probs) + jf.score(loaded, "ab") - jf.score(loaded, "abcd")) < 1e-4
    True
    """
    asked, tokenizer, _ = check_inputs(loaded, questions, DecoderOnly)
    max_len = loaded.model.config.max_len
    encoded = _encode_questions(asked, tokenizer, max_len)
    placed = place_params(loaded.params)
    model, params = prepare(loaded.model, placed)
    shared: list[int] = []
    if _can_share_contexts(model, params):
        shared = [i for i, question in enumerate(encoded) if _is_shared(question, max_len)]
    by_question: list[list[TokenScores]] = [[] for _ in encoded]
    sizes = [_sizes(encoded[i]) for i in shared]
    for batch in join_batches(sizes, _tokens_of, partial(_fits, max_len=max_len)):
        numbers = [shared[k] for k in batch.items]
        together = _score_together(model, params, [encoded[i] for i in numbers], batch)
        for i, rows_of_question in zip(numbers, together, strict=True):
            by_question[i] = rows_of_question
    # In the other questions each continuation is read with its context.
    alone = {*range(len(encoded))}.difference(shared)
    windows = [
        (i, (context + row, len(context) - 1))
        for i, (context, rows) in enumerate(encoded)
        if i in alone
        for row in rows
    ]
    scored = _score_windows(loaded.model, placed, [window for _, window in windows])
    for (i, _), scores in zip(windows, scored, strict=True):
        by_question[i].append(scores)
    return by_question


def _can_share_contexts(model: DecoderOnly, params: Any) -> bool:
    """Whether contexts of several lengths can be read into one cache."""
    cache = jax.eval_shape(
        lambda params: model.apply({"params": params}, 1, max_length=1, method="init_cache"), params
    )
    return getattr(cache, "can_truncate", True)


def _is_shared(question: "Question", max_len: int) -> bool:
    """Whether the context of a question is read once for its continuations."""
    size = _sizes(question)
    return size[1] > 1 and _fits(size, max_len)


Question = tuple[list[int], list[list[int]]]
"""The ids of a context and of its continuations."""


def _sizes(question: Question) -> tuple[int, int, int]:
    """The padded length of a context, the number of its continuations, their padded length."""
    context, rows = question
    longest = max(map(len, rows), default=1)
    return padded_length(len(context) - 1), len(rows), next_power_of_two(longest)


def _fits(size: tuple[int, ...], max_len: int) -> bool:
    """Whether a padded context and its padded continuations fit into a model's positions."""
    context_size, _, longest = size
    return context_size + longest <= max_len


def _tokens_of(size: tuple[int, ...]) -> int:
    """The tokens of a padded context and of its continuations."""
    context_size, count, longest = size
    return context_size + count * longest


def _encode_questions(questions: list[Any], tokenizer: Tokenizer, max_len: int) -> list[Question]:
    """The ids of each question; `DataError` for what is none, and for what does not fit."""
    encoded = []
    template = tokenizer.template or Template(bos_eos(tokenizer).first)

    def encode(texts: list[str]) -> list[list[int]]:
        """The ids of texts with what comes before them, but nothing after them."""
        rows = tokenizer.encode_inputs(texts, template)
        return [ids[: len(ids) - len(template.last)] for ids in rows]

    for number, question in enumerate(questions, 1):
        place = f"question {number} of {len(questions)}"
        if isinstance(question, str) or len(question) != 2 or isinstance(question[1], str):
            raise DataError(f"{place} must be (context, continuations): a text and a list of texts")
        context, continuations = question
        if isinstance(context, str):
            (ids,) = encode([context])
        else:
            ids = check_ids(f"the context of {place}", context, tokenizer)
        if not ids:
            if tokenizer.special.bos is None:
                raise DataError(
                    f"the context of {place} is empty, and the vocabulary has no token to begin a "
                    "text with: give it some text"
                )
            ids = [tokenizer.special.bos]
        rows = []
        for continuation in continuations:
            if not isinstance(continuation, str):
                row = check_ids(f"a continuation of {place}", continuation, tokenizer)
            elif isinstance(context, str):
                row = encode([context + continuation])[0][len(ids) :]
            else:
                row = tokenizer.encode(continuation)
            if not row:
                raise DataError(
                    f"a continuation of {place} has no tokens: give it some text, with the white "
                    "space before it"
                )
            if len(ids) + len(row) > max_len + 1:
                raise DataError(
                    f"{place} has {len(ids)} tokens of context and {len(row)} of a continuation, "
                    f"but max_len + 1 = {max_len + 1}: shorten the context"
                )
            rows.append(row)
        encoded.append((ids, rows))
    return encoded


def _score_windows(
    model: DecoderOnly, params: Any, windows: Sequence[tuple[list[int], int]]
) -> list[TokenScores]:
    """The scores of the tokens of each window (ids, known), in order.

    The first token and `known` more are read and not scored.
    """
    max_len = model.config.max_len
    by_window: list[TokenScores] = [TokenScores([], [], [])] * len(windows)
    scored_windows = [i for i, (ids, _) in enumerate(windows) if len(ids) > 1]
    sizes = [(min(padded_length(len(windows[i][0]) - 1), max_len),) for i in scored_windows]
    for batch in join_batches(sizes, itemgetter(0)):
        chosen = [scored_windows[k] for k in batch.items]
        (size,) = batch.size
        tokens = pad_right([windows[i][0] for i in chosen], batch.rows, size + 1)
        log_probs, most_likely = run_divided(params, _score_rows, model, tokens)
        for row, i in enumerate(chosen):
            ids, known = windows[i]
            scored = slice(known, len(ids) - 1)
            by_window[i] = TokenScores(
                ids[known + 1 :],
                log_probs[row, scored].tolist(),
                most_likely[row, scored].tolist(),
            )
    return by_window


def _score_together(
    model: DecoderOnly, params: Any, questions: Sequence[Question], batch: Batch
) -> list[list[TokenScores]]:
    """The scores of the continuations of each question, whose contexts are read once.

    `batch` has the sizes that they are padded to.
    """
    context_size, count, size = batch.size
    contexts = [context for context, _ in questions]
    before = pad_right([context[:-1] for context in contexts], batch.rows, context_size)
    lengths = np.zeros(batch.rows, np.int32)
    lengths[: len(contexts)] = [len(context) - 1 for context in contexts]
    after = np.zeros((batch.rows, count, size + 1), np.int32)
    for b, (context, rows) in enumerate(questions):
        begun = [[context[-1], *row] for row in rows]
        after[b, : len(rows)] = pad_right(begun, len(rows), size + 1)
    log_probs, most_likely = run_divided(params, _score_after, model, before, lengths, after)
    return [
        [
            TokenScores(
                row, log_probs[b, w, : len(row)].tolist(), most_likely[b, w, : len(row)].tolist()
            )
            for w, row in enumerate(rows)
        ]
        for b, (_, rows) in enumerate(questions)
    ]


@partial(jax.jit, static_argnames="model")
def _score_rows(
    model: DecoderOnly, params: Any, tokens: Int[Array, "B T+1"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    logits: Any = model.apply({"params": params}, tokens[:, :-1])
    return _score_labels(logits, tokens[:, 1:])


@partial(jax.jit, static_argnames="model")
def _score_after(
    model: DecoderOnly,
    params: Any,
    before: Int[Array, "B C"],
    lengths: Int[Array, " B"],
    after: Int[Array, "B W T+1"],
) -> tuple[Float[Array, "B W T"], Bool[Array, "B W T"]]:
    """The scores of the tokens of `after` but its first ones, after the tokens `before` them."""
    variables = {"params": params}
    batch, count, length = after.shape
    room = before.shape[1] + length - 1
    cache: Any = model.apply(variables, batch, max_length=room, method="init_cache")
    # Nothing uses these logits, so the compiler leaves them out.
    _, cache = model.apply(variables, before[:, None], cache, method="decode_step")
    cache = take_rows(cache.truncate(lengths), jnp.repeat(jnp.arange(batch), count))
    rows = after.reshape(batch * count, 1, length)
    logits, _ = model.apply(variables, rows[..., :-1], cache, method="decode_step")
    scores = _score_labels(logits[:, 0], rows[:, 0, 1:])
    log_probs, most_likely = (x.reshape(batch, count, length - 1) for x in scores)
    return log_probs, most_likely


def _score_labels(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """The log-probability of each label, and whether no other token is more likely."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return token_log_probs(logits, labels), chosen >= logits.max(axis=-1)


def _windows(ids: list[int], max_len: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Windows of up to max_len + 1 ids, and how many labels of each the one before has."""
    start = 0
    while start == 0 or start + max_len - stride < len(ids) - 1:
        window = ids[start : start + max_len + 1]
        if len(window) > 1:
            yield window, max_len - stride if start else 0
        start += stride


def padded_length(length: int) -> int:
    """16, 32, ... 256, 384, 512, 640, ...: the least of them that is at least `length`.

    >>> padded_length(20), padded_length(1304)
    (32, 1408)
    """
    if length <= _LONG:
        return max(16, next_power_of_two(length))
    return -(-length // _MULTIPLE) * _MULTIPLE
