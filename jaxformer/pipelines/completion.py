"""The beginning of a text in, its continuation out: at once, or piece by piece."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np

from jaxformer.decoding import (
    CompletionOptions,
    Hypotheses,
    Prompts,
    SamplingConfig,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines.batching import (
    BATCH_SIZE,
    as_given,
    can_refill,
    check_id,
    check_inputs,
    compile_for,
    divide,
    next_power_of_two,
    pad_left,
    pad_right,
    prefix_length,
    sliding_round,
    split_batch,
    split_queue,
)
from jaxformer.pipelines.continuation import Round, continue_ids
from jaxformer.pipelines.streaming import PartialText, run_streaming
from jaxformer.pretrained.loaded import Loaded
from jaxformer.runtime import concurrency, concurrently
from jaxformer.text.tokenizers import Tokenizer

Prompt = str | Sequence[int]
"""A text, or the ids of one, such as a chat template's with its special tokens."""
_Setting = SamplingConfig | CompletionOptions
_Pieces = Generator[tuple[PartialText, str], None, None]
_Job = Callable[[], _Pieces]
"""Completes the texts of one batch and yields their pieces."""


class Completion(NamedTuple):
    """The continuation of a prompt."""

    text: str
    """Its text, without the stop string that ended it and without half a character at its end."""
    ids: list[int]
    """All ids that were written, EOS included."""
    log_probs: list[float]
    """The log-probability (nats) of each id."""
    ended: bool
    """Whether EOS or a stop string ended it, rather than its length."""


@overload
def complete(  # type: ignore[overload-overlap]
    loaded: Loaded,
    prompts: str,
    *settings: _Setting,
    details: Literal[False] = ...,
    **changes: Any,
) -> str: ...
@overload
def complete(
    loaded: Loaded,
    prompts: Iterable[Prompt],
    *settings: _Setting,
    details: Literal[False] = ...,
    **changes: Any,
) -> list[str]: ...
@overload
def complete(  # type: ignore[overload-overlap]
    loaded: Loaded,
    prompts: str,
    *settings: _Setting,
    details: Literal[True],
    **changes: Any,
) -> Completion: ...
@overload
def complete(
    loaded: Loaded,
    prompts: Iterable[Prompt],
    *settings: _Setting,
    details: Literal[True],
    **changes: Any,
) -> list[Completion]: ...
def complete(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    details: bool = False,
    first_example_id: int = 0,
    **changes: Any,
) -> Any:
    """The continuation of each prompt, or of the one prompt, without the prompt.

    With `details` a `Completion`: its ids and their log-probabilities too. Tokens are drawn as the
    settings of `loaded` say; a `SamplingConfig` or `CompletionOptions` in `settings` replaces its
    own, `changes` replace single fields, as in temperature=0.7.

    The continuation of prompt i depends on the seed of the settings and on its example id,
    `first_example_id + i`, not on the other prompts. On a CPU two programs run at a time. Of more
    prompts than they have rows, 64 each, the next takes the row of one that has ended (on one
    device, without stop strings, window, ALiBi and relative positions). A text is read as the
    folder's own tokenizer reads it, perhaps after BOS; an empty one begins at BOS. Raises
    `DataError` for no prompt, and for an empty one if there is no BOS, `ConfigError` for a prompt
    that does not fit `max_len`, for another model, and for a tokenizer and settings that do not
    fit.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> len(jf.complete(loaded, ["ab", "", "c"], max_new_tokens=3))
    3
    >>> added = jf.complete(loaded, "ab", max_new_tokens=3, details=True)
    >>> round(float(jnp.exp(added.log_probs[0])), 3)  # each of the 10 tokens is as likely
    0.1
    """
    run, texts = _start(loaded, prompts, settings, changes, first_example_id)
    jobs = run.jobs(texts, streams=bool(run.options.stop))
    for _ in concurrently((partial(_exhaust, job) for job in jobs), run.programs):
        pass
    if not details:
        return as_given(prompts, [text.text for text in texts])
    completions = [Completion(text.text, text.ids, text.log_probs, text.ended) for text in texts]
    return as_given(prompts, completions)


def stream(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = 0,
    **changes: Any,
) -> Iterator[tuple[int, str]]:
    """Pairs of a prompt's index and a new piece of its continuation, as soon as it is written.

    The pieces of a prompt joined are the text that `complete` returns; no piece holds half a
    character. The program runs ahead; closing the iterator stops it. Raises at once what
    `complete` raises.
    """
    run, texts = _start(loaded, prompts, settings, changes, first_example_id)
    jobs = run._replace(programs=1).jobs(texts, streams=True)
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
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    settings: tuple[_Setting, ...],
    changes: dict[str, Any],
    first_example_id: int,
) -> tuple["_Run", list[PartialText]]:
    """The values of the call, and the texts to write."""
    inputs, tokenizer, _ = check_inputs(loaded, prompts, DecoderOnly)
    config, options = loaded.choose_settings(settings, changes, SamplingConfig, CompletionOptions)
    model = loaded.model
    special, max_len, length = tokenizer.special, model.config.max_len, config.max_new_tokens
    eos = options.eos
    if eos is None:
        eos = () if special.eos is None else (special.eos,)
    for token in eos:
        check_id("eos", token, model.config.vocab_size)
    texts, encoded = [], _prompt_ids(inputs, tokenizer)
    for i, ids in enumerate(encoded):
        if not ids:
            if special.bos is None:
                raise DataError(
                    f"prompt {i + 1} of {len(encoded)} is empty, and the vocabulary has no token "
                    "to begin a text with: give it some text"
                )
            ids = [special.bos]
        total = len(ids) + length
        if total > max_len and options.overflow == "refuse":
            raise ConfigError(
                f"prompt {i + 1} of {len(encoded)} has {len(ids)} tokens, which makes {total} with "
                f"max_new_tokens={length}, but max_len={max_len}: shorten it, give a smaller "
                "max_new_tokens, or give overflow='slide'"
            )
        number, stop = first_example_id + i, options.stop
        texts.append(PartialText(number, ids, tokenizer, max_new_tokens=length, eos=eos, stop=stop))
    known, count = tokenizer.vocab_size, concurrency(loaded.params)
    return _Run(model, loaded.params, config, options, known, len(texts), count), texts


def _prompt_ids(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each prompt; `DataError` for what is neither a text nor ids of tokens."""
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            text = isinstance(prompt, str)
            ids = np.asarray(tokenizer.encode_inputs([prompt])[0] if text else prompt)
        except ValueError:  # lists of different lengths
            ids = np.empty(())
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(
                f"prompt {number} is a {type(prompt).__name__}, but must be a string or a sequence "
                "of integer ids"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise DataError(
                f"prompt {number} has ids from {ids.min()} to {ids.max()}, but ids are 0 to "
                f"{tokenizer.vocab_size - 1}"
            )
        encoded.append([int(index) for index in ids])
    return encoded


class _Run(NamedTuple):
    """The values that all batches of a call share."""

    model: DecoderOnly
    params: Any
    config: SamplingConfig
    options: CompletionOptions
    known: int  # ids of the tokenizer
    num_texts: int
    programs: int  # at a time

    @property
    def batch_size(self) -> int:
        return split_batch(self.num_texts, self.programs, BATCH_SIZE)

    def jobs(self, texts: list[PartialText], *, streams: bool) -> Iterator[_Job]:
        """Jobs of some of `texts`; one that `streams` yields each piece at once."""
        # Of several processes only one would get the tokens: there a round ends first.
        callback = np.int32(0) if streams and jax.process_count() == 1 else None
        waits = callback is None and can_refill(self.model, self.params)
        for batch, rows, size, length in self.batches(texts, waits):
            inputs = partial(self.inputs, batch, rows, size, length, callback)
            settings = {"config": self.config, "eos": batch[0].eos, "length": length}
            # Compiled here, under the caller's settings of JAX, which its threads do not share.
            settings |= {"known": self.known, "chunk": self.options.prefill_chunk}
            settings |= {"rows": self.batch_size} if rows > self.batch_size else {}
            run = compile_for(self.params, continue_ids, self.model, inputs(), **settings)
            yield partial(_write, run, inputs, batch)

    def batches(
        self, texts: list[PartialText], waits: bool
    ) -> Iterator[tuple[list[PartialText], int, int, int]]:
        """(texts, padded number of them, how many of their last ids the model sees, new tokens).

        Where texts may wait for the row of another, a batch has more of them than `batch_size`.
        """
        max_len, rows = self.model.config.max_len, self.batch_size
        length = self.config.max_new_tokens
        order = sorted(texts, key=lambda text: len(text.prompt))
        count = sum(len(text.prompt) + length <= max_len for text in texts)
        fit, slide = order[:count], order[count:]
        most = split_queue(count, self.programs, rows) if waits else rows

        def prefix(text: PartialText) -> int:
            return prefix_length(len(text.prompt), length, max_len)

        groups = [group for group, _ in divide(fit, BATCH_SIZE, BATCH_SIZE)]
        if most > rows:  # the prompts of a queue have one padded length
            groups = [list(group) for _, group in groupby(fit, prefix)]
        for similar in groups:
            size = max(len(text.prompt) for text in similar)
            for batch, padded in divide(similar, rows, most, self.programs):
                yield _by_id(batch), padded, size, length
        for batch, padded in divide(slide, rows, rows):
            yield _by_id(batch), padded, *sliding_round(max_len)

    def inputs(
        self,
        batch: list[PartialText],
        rows: int,
        size: int,
        length: int,
        callback: np.int32 | None,
    ) -> Round:
        """The inputs of the next round of the texts of `batch`, in `rows` rows."""
        contexts, config = [text.context(size) for text in batch], self.config
        prefix = prefix_length(size, length, self.model.config.max_len)
        tokens = pad_left(contexts, rows, prefix + 1)

        def column(values: list[int]) -> np.ndarray:
            """[rows] int32, with zeros for rows without a text."""
            return np.array(values + [0] * (rows - len(values)), np.int32)

        prompts = Prompts(
            last_tokens=tokens[:, -1],
            max_new_tokens=column([text.left for text in batch]),
            example_ids=column([text.example_id for text in batch]),
            step_offset=np.int32(max(len(text.ids) for text in batch)),
        )
        if config.repetition_penalty != 1 or config.no_repeat_ngram_size:
            texts = [text.prompt + text.ids for text in batch]
            # The size is the same in all rounds, so that they are one program.
            prompts_end = max(len(text.prompt) for text in batch)
            most = next_power_of_two(prompts_end + config.max_new_tokens)
            history = pad_right(texts, rows, most)
            lengths = column([len(text) for text in texts])
            prompts = prompts._replace(history=history, history_lengths=lengths)
        left_padding = column([prefix + 1 - len(context) for context in contexts])
        rng = jax.random.key(self.options.seed)
        return Round(tokens, left_padding, prompts, rng, callback)


def _write(
    program: Callable[[Round], Hypotheses], inputs: Callable[[], Round], batch: list[PartialText]
) -> _Pieces:
    """Writes the texts of `batch` to their ends, in rounds of one program."""
    while not all(text.done for text in batch):
        written = [len(text.ids) for text in batch]
        hypotheses = yield from _run(program, inputs(), batch)
        for row, text in enumerate(batch):
            log_probs = hypotheses.log_probs[row, 0, : len(text.ids) - written[row]]
            text.log_probs.extend(log_probs.tolist())


def _by_id(texts: list[PartialText]) -> list[PartialText]:
    return sorted(texts, key=lambda text: text.example_id)


def _run(
    program: Callable[[Round], Hypotheses], inputs: Round, batch: list[PartialText]
) -> Generator[tuple[PartialText, str], None, Hypotheses]:
    """Yields what one round of `program` adds to the texts of `batch`; returns its result."""

    added = 0

    def add_tokens(tokens):
        nonlocal added
        added += 1
        pieces, stop = [], np.ones(len(tokens), bool)
        for row, text in enumerate(batch):
            piece = "" if text.done else text.add(int(tokens[row]))
            pieces += [(text, piece)] if piece else []
            stop[row] = text.done
        return pieces, stop

    def run(number):
        return program(inputs._replace(callback=np.int32(number)))

    if inputs.callback is None:
        hypotheses = program(inputs)
    else:
        hypotheses = yield from run_streaming(run, add_tokens)
    for tokens in hypotheses.tokens[:, 0, added:].T:
        yield from add_tokens(tokens)[0]
    return hypotheses
