"""The beginning of a text in, its continuation out: at once, or piece by piece."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxformer.config import ConfigError, TransformerConfig, check_least, check_names
from jaxformer.data import DataError
from jaxformer.decoding import (
    Hypotheses,
    Pick,
    Rule,
    banned,
    greedy,
    repetition_penalty,
    sample,
    truncated,
)
from jaxformer.generation.batches import check_fit, pad_left, padded_size, share
from jaxformer.generation.concurrency import concurrency, concurrently
from jaxformer.generation.listening import run_and_hear, watch
from jaxformer.generation.step import step_function
from jaxformer.generation.text import Text
from jaxformer.models import DecoderOnly
from jaxformer.tokenizers import Tokenizer

_ROWS = 64

_Pieces = Generator[tuple[Text, str], None, None]
_Write = Callable[[], _Pieces]


@dataclass(frozen=True)
class SamplingConfig:
    """How to go on: at most `length` tokens, each drawn at `temperature`, 0 for the likeliest.

    Drawn from the `top_k` likeliest (0: from all), of these the fewest that have `top_p` of the
    probability, of these those at least `min_p` times as likely as the likeliest. What the text
    holds, prompt included, is made less likely by `repetition_penalty`. A text ends before the
    first of `stop`. `overflow`: what to do with a prompt that with `length` more tokens is longer
    than `max_len`: "refuse" it, or "slide": go on in rounds of `max_len // 2` tokens, each
    of which sees the last tokens before the round that leave it room. `ConfigError` for what
    cannot be.
    """

    length: int = 200
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    overflow: Literal["refuse", "slide"] = "refuse"
    seed: int = 0

    def __post_init__(self):
        check_names(self)
        check_least(self, 1, "length")
        check_least(self, 0, "top_k", "seed")
        if self.seed >= 2**32:
            raise ConfigError(f"seed={self.seed}, but it must be below 2^32")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}, but it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p}, but a share must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p={self.min_p}, but a share must be 0 to 1")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty}, but it must be positive: 1 is none"
            )
        if isinstance(self.stop, str) or "" in self.stop:
            raise ConfigError(f"stop={self.stop!r}, but it must be texts of at least a character")

    @property
    def pick(self) -> Pick:
        """The way of picking a token that these settings mean."""
        if self.temperature == 0:
            return greedy
        return truncated(self.temperature, k=self.top_k or None, p=self.top_p, min_p=self.min_p)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that these settings mean."""
        none = self.repetition_penalty == 1
        return () if none else (repetition_penalty(self.repetition_penalty),)


class Completion(NamedTuple):
    """What was added to a prompt: its text, its ids and their log-probabilities (nats).

    The text is without the stop string that ended it and without half a character at its end;
    the ids are all that were made, an end token last. `ended`: by one of these rather than at
    the length asked for.
    """

    text: str
    ids: list[int]
    log_probs: list[float]
    ended: bool


def complete(
    model: DecoderOnly,
    params: Any,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    sampling: SamplingConfig = SamplingConfig(),
    *,
    first_row: int = 0,
    ends: Sequence[int] | None = None,
) -> list[Completion]:
    """The continuation of each prompt.

    What prompt i gives is drawn by the seed, its number `first_row + i` and the position, and
    depends on no other prompt; on a CPU two programs run at a time. An empty prompt begins at the
    vocabulary's begin token. Each of the ids `ends` ends a text, None stands for the vocabulary's
    end token. Raises `DataError` for an empty prompt when there is no begin token, and
    `ConfigError` for a prompt that does not fit `max_len` or a tokenizer that does not fit the
    model.
    """
    ends = _ends(ends, tokenizer)
    texts = _texts(model, prompts, tokenizer, sampling, first_row, ends)
    count = concurrency(params)
    wanted = {"watched": bool(sampling.stop), "rows": share(len(texts), count, _ROWS)}
    written = _write(model, params, texts, tokenizer, sampling, ends=ends, **wanted)
    for _ in concurrently((partial(_to_the_end, write) for write in written), count):
        pass
    return [Completion(text.text, text.ids, text.log_probs, text.ended) for text in texts]


def stream(
    model: DecoderOnly,
    params: Any,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    sampling: SamplingConfig = SamplingConfig(),
    *,
    first_row: int = 0,
    ends: Sequence[int] | None = None,
) -> Iterator[tuple[int, str]]:
    """Pairs of a prompt's index and a new piece of its continuation, as soon as it is made.

    A prompt's pieces joined are the text that `complete` gives, and no piece holds half a
    character. The program runs ahead; closing the iterator stops it. Raises at once what
    `complete` raises.
    """
    ends = _ends(ends, tokenizer)
    texts = _texts(model, prompts, tokenizer, sampling, first_row, ends)
    wanted = {"watched": True, "rows": share(len(texts), 1, _ROWS)}
    written = _write(model, params, texts, tokenizer, sampling, ends=ends, **wanted)
    return _numbered(written, first_row)


def _ends(given: Sequence[int] | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    end = tokenizer.special.eos
    return tuple(given) if given is not None else () if end is None else (end,)


def _to_the_end(write: _Write) -> None:
    for _ in write():
        pass


def _numbered(written: Iterator[_Write], first_row: int) -> Iterator[tuple[int, str]]:
    for write in written:
        with closing(write()) as pieces:
            for text, piece in pieces:
                yield text.number - first_row, piece


def _texts(
    model: DecoderOnly,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    first_row: int,
    ends: tuple[int, ...],
) -> list[Text]:
    check_fit(model, tokenizer)
    special, limit = tokenizer.special, model.config.max_len
    texts = []
    for i, ids in enumerate(tokenizer.encode_batch(prompts)):
        if not ids and special.bos is None:
            raise DataError(
                f"prompt {i + 1} of {len(prompts)} is empty, and the vocabulary has no token to "
                "begin a text with: give it some text"
            )
        ids = ids or [special.bos]
        total = len(ids) + sampling.length
        if total > limit and sampling.overflow == "refuse":
            raise ConfigError(
                f"prompt {i + 1} of {len(prompts)} has {len(ids)} tokens, which makes {total} with "
                f"length={sampling.length}, but max_len={limit}: shorten it, ask for a smaller "
                "length, or give overflow='slide'"
            )
        wanted = {"length": sampling.length, "ends": ends, "stop": sampling.stop}
        texts.append(Text(first_row + i, ids, tokenizer, **wanted))
    return texts


class _Asked(NamedTuple):
    """What a round needs to know of B texts, [B] each if not said otherwise."""

    tokens: jax.Array  # [B, P + 1], ending in the last place
    begins: jax.Array  # how many places before are empty
    limits: jax.Array
    rows: jax.Array
    rng: jax.Array  # a key
    made: jax.Array  # how many tokens were made in earlier rounds
    seen: jax.Array | None  # [B, V]
    listener: jax.Array | None  # its number, if there is one


@partial(jax.jit, static_argnames=("model", "way", "ends", "known"))
def _continue(
    model: DecoderOnly,
    params: Any,
    asked: _Asked,
    *,
    way: SamplingConfig,
    ends: tuple[int, ...],
    known: int,
) -> Hypotheses:
    """At most `way.length` of the `known` tokens after each prompt: prefill and steps."""
    batch, size = asked.tokens.shape
    begin = partial(model.apply, {"params": params}, method="start")
    cache = begin(batch, length=size - 1 + way.length, begins=asked.begins)
    if size > 1:
        prefix = asked.tokens[:, None, :-1]
        # Nothing uses these logits, so that the compiler leaves them out.
        _, cache = model.apply({"params": params}, prefix, cache, method="extend")
    unknown = range(known, model.config.vocab_size)
    return sample(
        step_function(model, params),
        cache,
        asked.tokens[:, -1],
        asked.limits,
        asked.rng,
        asked.rows,
        pick=way.pick,
        length=way.length,
        end=ends or None,
        rules=(*way.rules, banned(unknown)) if unknown else way.rules,
        seen=asked.seen,
        watch=None if asked.listener is None else lambda _, tokens: watch(asked.listener, tokens),
        made=asked.made,
    )


def _write(
    model: DecoderOnly,
    params: Any,
    texts: list[Text],
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    ends: tuple[int, ...],
    watched: bool,
    rows: int,
) -> Iterator[_Write]:
    """What writes `texts`, `rows` of them each, and yields their pieces.

    At once if `watched`, else after each round.
    """
    rng, listener = jax.random.key(sampling.seed), np.int32(0) if watched else None
    for chunk, size, way in _chunks(texts, model.config.max_len, sampling, rows):
        ask = partial(_ask, chunk, rows, size, model.config, way, rng, listener)
        # Compiled here, under the caller's settings of JAX, which its threads do not share.
        compiled = _continue.lower(
            model, params, ask(), way=way, ends=ends, known=tokenizer.vocab_size
        ).compile()
        yield partial(_go_on, partial(compiled, params), ask, chunk)


def _go_on(
    program: Callable[[_Asked], Hypotheses], ask: Callable[[], _Asked], chunk: list[Text]
) -> _Pieces:
    """Writes the texts of `chunk` to their ends, in rounds of one program."""
    while not all(text.done for text in chunk):
        begun = [len(text.ids) for text in chunk]
        found = yield from _run(program, ask(), chunk)
        for row, text in enumerate(chunk):
            log_probs = found.log_probs[row, 0, : len(text.ids) - begun[row]]
            text.log_probs.extend(log_probs.tolist())


def _chunks(
    texts: list[Text], limit: int, sampling: SamplingConfig, rows: int
) -> Iterator[tuple[list[Text], int, SamplingConfig]]:
    """(up to `rows` texts to go on with, how many of their last ids to see, how)."""
    way = replace(sampling, stop=(), overflow="refuse", seed=0)
    order = sorted(texts, key=lambda text: len(text.prompt))
    fit = sum(len(text.prompt) + way.length <= limit for text in texts)
    for together in _parts(order[:fit], _ROWS):
        size = max(len(text.prompt) for text in together)
        for chunk in _parts(together, rows):
            yield chunk, size, way
    half = replace(way, length=max(1, limit // 2))
    for chunk in _parts(order[fit:], rows):
        yield chunk, max(1, limit - half.length), half


def _parts(texts: list[Text], rows: int) -> Iterator[list[Text]]:
    for start in range(0, len(texts), rows):
        yield sorted(texts[start : start + rows], key=lambda text: text.number)


def _ask(
    chunk: list[Text],
    rows: int,
    size: int,
    config: TransformerConfig,
    way: SamplingConfig,
    rng: jax.Array,
    listener: np.int32 | None,
) -> _Asked:
    contexts = [text.context(size) for text in chunk]
    prefix = padded_size(size - 1, config.max_len - way.length) if size > 1 else 0
    seen = None
    if way.rules:
        seen = np.zeros((rows, config.vocab_size), np.int32)
        for row, text in enumerate(chunk):
            np.add.at(seen[row], text.prompt + text.ids, 1)
    return _Asked(
        tokens=pad_left(contexts, rows, prefix + 1),
        begins=_column([prefix + 1 - len(context) for context in contexts], rows),
        limits=_column([text.left for text in chunk], rows),
        rows=_column([text.number for text in chunk], rows),
        rng=rng,
        made=np.int32(max(len(text.ids) for text in chunk)),
        seen=seen,
        listener=listener,
    )


def _column(values: list[int], rows: int) -> np.ndarray:
    return np.array(values + [0] * (rows - len(values)), np.int32)


def _run(
    program: Callable[[_Asked], Hypotheses], asked: _Asked, chunk: list[Text]
) -> Generator[tuple[Text, str], None, Hypotheses]:
    """Yields what one round of `program` adds to the texts of `chunk`; returns what it found."""

    def hear(tokens):
        pieces, stop = [], np.ones(len(tokens), bool)
        for row, text in enumerate(chunk):
            piece = "" if text.done else text.add(int(tokens[row]))
            pieces += [(text, piece)] if piece else []
            stop[row] = text.done
        return pieces, stop

    def run(number):
        return jax.device_get(program(asked._replace(listener=np.int32(number))))

    if asked.listener is not None:
        return (yield from run_and_hear(run, hear))
    found = jax.device_get(program(asked))
    for tokens in found.tokens[:, 0].T:
        yield from hear(tokens)[0]
    return found
