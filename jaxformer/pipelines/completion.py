"""The beginning of a text in, its continuation out: at once, or piece by piece."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxformer.config import TransformerConfig
from jaxformer.decoding import Hypotheses, Prompts, SamplingConfig, sample, suppress_tokens
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines.batching import (
    BATCH_SIZE,
    check_tokenizer,
    make_step_fn,
    pad_left,
    padded_length,
    split_batch,
)
from jaxformer.pipelines.streaming import PartialText, report_tokens, run_streaming
from jaxformer.runtime import concurrency, concurrently
from jaxformer.text.tokenizers import Tokenizer

Prompt = str | Sequence[int]
"""A text, or the ids of one, such as a chat template's with its special tokens."""
_Pieces = Generator[tuple[PartialText, str], None, None]
_Job = Callable[[], _Pieces]
"""Completes the texts of one batch and yields their pieces."""


class Completion(NamedTuple):
    """The continuation of a prompt.

    >>> added = Completion(text=" rose", ids=[7, 2], log_probs=[-0.5, -0.25], ended=True)
    >>> sum(added.log_probs), added.ended  # of " rose" and EOS
    (-0.75, True)
    """

    text: str
    """Its text, without the stop string that ended it and without half a character at its end."""
    ids: list[int]
    """All ids that were written, EOS included."""
    log_probs: list[float]
    """The log-probability (nats) of each id."""
    ended: bool
    """Whether EOS or a stop string ended it, rather than its length."""


def complete(
    model: DecoderOnly,
    params: Any,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: SamplingConfig = SamplingConfig(),
    *,
    first_example_id: int = 0,
) -> list[Completion]:
    """The continuation of each prompt.

    The continuation of prompt i depends on the seed and on its example id, `first_example_id + i`,
    not on the other prompts. On a CPU two programs run at a time. An empty prompt begins at the
    vocabulary's BOS. Raises `DataError` for an empty prompt if there is no BOS, and `ConfigError`
    for a prompt that does not fit `max_len` and for a tokenizer that does not fit the model.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> sampling = jf.SamplingConfig(max_new_tokens=3)
    >>> (added,) = jf.complete(model, params, ["ab"], tokenizer, sampling)
    >>> round(float(jnp.exp(added.log_probs[0])), 3)  # each of the 10 tokens is as likely
    0.1
    """
    texts, config = _start(model, prompts, tokenizer, config, first_example_id)
    count = concurrency(params)
    batch_size = split_batch(len(texts), count, BATCH_SIZE)
    streams = any(text.stop for text in texts)
    jobs = _jobs(model, params, texts, tokenizer, config, streams=streams, batch_size=batch_size)
    for _ in concurrently((partial(_exhaust, job) for job in jobs), count):
        pass
    return [Completion(text.text, text.ids, text.log_probs, text.ended) for text in texts]


def stream(
    model: DecoderOnly,
    params: Any,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: SamplingConfig = SamplingConfig(),
    *,
    first_example_id: int = 0,
) -> Iterator[tuple[int, str]]:
    """Pairs of a prompt's index and a new piece of its continuation, as soon as it is written.

    The pieces of a prompt joined are the text that `complete` returns; no piece holds half a
    character. The program runs ahead; closing the iterator stops it. Raises at once what
    `complete` raises.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    >>> arguments = model, params, ["ab", "c"], tokenizer, jf.SamplingConfig(max_new_tokens=3)
    >>> texts = ["", ""]
    >>> for index, piece in stream(*arguments):
    ...     texts[index] += piece
    >>> texts == [added.text for added in jf.complete(*arguments)]
    True
    """
    texts, config = _start(model, prompts, tokenizer, config, first_example_id)
    batch_size = split_batch(len(texts), 1, BATCH_SIZE)
    jobs = _jobs(model, params, texts, tokenizer, config, streams=True, batch_size=batch_size)
    return _indexed_pieces(jobs, first_example_id)


def _exhaust(job: _Job) -> None:
    for _ in job():
        pass


def _indexed_pieces(jobs: Iterator[_Job], first_example_id: int) -> Iterator[tuple[int, str]]:
    for job in jobs:
        with closing(job()) as pieces:
            for text, piece in pieces:
                yield text.example_id - first_example_id, piece


def _start(
    model: DecoderOnly,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: SamplingConfig,
    first_example_id: int,
) -> tuple[list[PartialText], SamplingConfig]:
    """The texts to write, and the part of `config` that a compiled program depends on."""
    check_tokenizer(tokenizer, model.config.vocab_size)
    special, max_len, length = tokenizer.special, model.config.max_len, config.max_new_tokens
    eos = config.eos
    if eos is None:
        eos = () if special.eos is None else (special.eos,)
    texts = []
    for i, ids in enumerate(_prompt_ids(prompts, tokenizer)):
        if not ids:
            if special.bos is None:
                raise DataError(
                    f"prompt {i + 1} of {len(prompts)} is empty, and the vocabulary has no token "
                    "to begin a text with: give it some text"
                )
            ids = [special.bos]
        total = len(ids) + length
        if total > max_len and config.overflow == "refuse":
            raise ConfigError(
                f"prompt {i + 1} of {len(prompts)} has {len(ids)} tokens, which makes {total} with "
                f"max_new_tokens={length}, but max_len={max_len}: shorten it, give a smaller "
                "max_new_tokens, or give overflow='slide'"
            )
        texts.append(
            PartialText(
                first_example_id + i,
                ids,
                tokenizer,
                max_new_tokens=length,
                eos=eos,
                stop=config.stop,
            )
        )
    return texts, replace(config, eos=eos, stop=(), overflow="refuse")


def _prompt_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt; `DataError` for one that no token has."""
    written = iter(tokenizer.encode_batch([each for each in prompts if isinstance(each, str)]))
    found = [next(written) if isinstance(each, str) else list(each) for each in prompts]
    for number, ids in enumerate(found, start=1):
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise DataError(
                f"prompt {number} of {len(prompts)} has ids from {min(ids)} to {max(ids)}, but ids "
                f"are 0 to {tokenizer.vocab_size - 1}"
            )
    return found


class _Round(NamedTuple):
    """The inputs of a compiled program that continues B texts."""

    tokens: Int[Array | np.ndarray, "B P"]  # padded at their beginnings
    left_padding: Int[Array | np.ndarray, " B"]
    prompts: Prompts
    rng: Key[Array, ""]
    callback: Int[Array, ""] | np.integer | None  # its number, if the program reports its tokens


@partial(jax.jit, static_argnames=("model", "config", "known"))
def _continue(
    model: DecoderOnly, params: Any, inputs: _Round, *, config: SamplingConfig, known: int
) -> Hypotheses:
    """Continues each prompt by at most `config.max_new_tokens` of the first `known` tokens."""
    batch, size = inputs.tokens.shape
    begin = partial(model.apply, {"params": params}, method="init_cache")
    cache = begin(
        batch, max_length=size - 1 + config.max_new_tokens, left_padding=inputs.left_padding
    )
    if size > 1:
        prefix = inputs.tokens[:, None, :-1]
        # Nothing uses these logits, so the compiler leaves them out.
        _, cache = model.apply({"params": params}, prefix, cache, method="decode_step")
    unknown, callback = range(known, model.config.vocab_size), inputs.callback
    return sample(
        make_step_fn(model, params),
        cache,
        inputs.prompts,
        inputs.rng,
        config,
        logits_processors=[suppress_tokens(unknown)] if unknown else [],
        stop_fn=None if callback is None else lambda _, tokens: report_tokens(callback, tokens),
    )


def _jobs(
    model: DecoderOnly,
    params: Any,
    texts: list[PartialText],
    tokenizer: Tokenizer,
    config: SamplingConfig,
    *,
    streams: bool,
    batch_size: int,
) -> Iterator[_Job]:
    """Jobs of up to `batch_size` texts; one that `streams` yields each piece at once."""
    rng, callback = jax.random.key(config.seed), np.int32(0) if streams else None
    config = replace(config, seed=0)
    for batch, size, own_config in _batches(texts, model.config.max_len, config, batch_size):
        inputs = partial(_inputs, batch, batch_size, size, model.config, own_config, rng, callback)
        # Compiled here, under the caller's settings of JAX, which its threads do not share.
        compiled = _continue.lower(
            model, params, inputs(), config=own_config, known=tokenizer.vocab_size
        ).compile()
        yield partial(_write, partial(compiled, params), inputs, batch)


def _write(
    program: Callable[[_Round], Hypotheses], inputs: Callable[[], _Round], batch: list[PartialText]
) -> _Pieces:
    """Writes the texts of `batch` to their ends, in rounds of one program."""
    while not all(text.done for text in batch):
        written = [len(text.ids) for text in batch]
        found = yield from _run(program, inputs(), batch)
        for row, text in enumerate(batch):
            log_probs = found.log_probs[row, 0, : len(text.ids) - written[row]]
            text.log_probs.extend(log_probs.tolist())


def _batches(
    texts: list[PartialText], max_len: int, config: SamplingConfig, batch_size: int
) -> Iterator[tuple[list[PartialText], int, SamplingConfig]]:
    """(up to `batch_size` texts, how many of their last ids the model sees, settings)."""
    order = sorted(texts, key=lambda text: len(text.prompt))
    fit = sum(len(text.prompt) + config.max_new_tokens <= max_len for text in texts)
    for similar in _parts(order[:fit], BATCH_SIZE):
        size = max(len(text.prompt) for text in similar)
        for batch in _parts(similar, batch_size):
            yield batch, size, config
    half = replace(config, max_new_tokens=max(1, max_len // 2))
    for batch in _parts(order[fit:], batch_size):
        yield batch, max(1, max_len - half.max_new_tokens), half


def _parts(texts: list[PartialText], size: int) -> Iterator[list[PartialText]]:
    for start in range(0, len(texts), size):
        yield sorted(texts[start : start + size], key=lambda text: text.example_id)


def _inputs(
    batch: list[PartialText],
    batch_size: int,
    size: int,
    model_config: TransformerConfig,
    config: SamplingConfig,
    rng: jax.Array,
    callback: np.int32 | None,
) -> _Round:
    contexts = [text.context(size) for text in batch]
    room = model_config.max_len - config.max_new_tokens
    prefix = padded_length(size - 1, room) if size > 1 else 0
    counts = None
    if config.repetition_penalty != 1:
        counts = np.zeros((batch_size, model_config.vocab_size), np.int32)
        for row, text in enumerate(batch):
            np.add.at(counts[row], text.prompt + text.ids, 1)
    tokens = pad_left(contexts, batch_size, prefix + 1)
    prompts = Prompts(
        last_tokens=tokens[:, -1],
        max_lengths=_column([text.left for text in batch], batch_size),
        example_ids=_column([text.example_id for text in batch], batch_size),
        step_offset=np.int32(max(len(text.ids) for text in batch)),
        token_counts=counts,
    )
    left_padding = _column([prefix + 1 - len(context) for context in contexts], batch_size)
    return _Round(tokens, left_padding, prompts, rng, callback)


def _column(values: list[int], batch_size: int) -> np.ndarray:
    return np.array(values + [0] * (batch_size - len(values)), np.int32)


def _run(
    program: Callable[[_Round], Hypotheses], inputs: _Round, batch: list[PartialText]
) -> Generator[tuple[PartialText, str], None, Hypotheses]:
    """Yields what one round of `program` adds to the texts of `batch`; returns its result."""

    def add_tokens(tokens):
        pieces, stop = [], np.ones(len(tokens), bool)
        for row, text in enumerate(batch):
            piece = "" if text.done else text.add(int(tokens[row]))
            pieces += [(text, piece)] if piece else []
            stop[row] = text.done
        return pieces, stop

    def run(number):
        return jax.device_get(program(inputs._replace(callback=np.int32(number))))

    if inputs.callback is not None:
        return (yield from run_streaming(run, add_tokens))
    found = jax.device_get(program(inputs))
    for tokens in found.tokens[:, 0].T:
        yield from add_tokens(tokens)[0]
    return found
