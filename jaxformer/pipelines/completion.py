"""The beginning of a text in, its continuation out: at once, or piece by piece."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Int

from jaxformer.decoding import (
    CompletionOptions,
    LogitsProcessor,
    SamplerInputs,
    SampleState,
    SamplingConfig,
    row_values,
    sample_more,
    without_values,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines.batching import BATCH_SIZE, pad_right
from jaxformer.pipelines.decoding_weights import prepare
from jaxformer.pipelines.inputs import (
    Prompt,
    check_id,
    check_inputs,
    suppressed_ids,
    unwrap_single,
)
from jaxformer.pipelines.partial_text import PartialText
from jaxformer.pipelines.prompts import prompt_ids
from jaxformer.pipelines.reading import (
    NewTexts,
    begin_rows,
    exact_reading_plan,
    read_prompts,
    reading_plan,
    text_size,
)
from jaxformer.pipelines.rows import (
    FOREVER,
    STEADY,
    RowDecoder,
    decode_all,
    decode_parts,
    pace_of_whole_texts,
)
from jaxformer.pretrained.loaded import Loaded
from jaxformer.runtime import concurrency
from jaxformer.text.tokenizers import Tokenizer

_Setting = SamplingConfig | CompletionOptions


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
    first_example_id: int = ...,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> str: ...
@overload
def complete(
    loaded: Loaded,
    prompts: Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = ...,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> list[str]: ...
def complete(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = 0,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Any:
    """The continuation of each prompt, or of the one prompt, without the prompt.

    Tokens are drawn as the settings of `loaded` say; a `SamplingConfig` or `CompletionOptions` in
    `settings` replaces its own, `changes` replace single fields, as in temperature=0.7.

    `logits_processors` change the logits of each token, after the repetition penalty and before the
    constraints of the settings. A function that is made anew in each call is compiled anew.

    The continuation of prompt i depends on the seed of the settings and on its example id,
    `first_example_id + i`, not on the other prompts. On a CPU two programs run at a time.
    Where there are more prompts than rows, 64 a program, the next takes the row of one that has
    ended. A text is read as the folder's own tokenizer reads it, perhaps after BOS; an empty one
    begins at BOS. A Ctrl-C ends the call after 8 tokens, a second or up to 2,048 tokens of prompts,
    except while a program is compiled. Raises `DataError` for no prompt, and for an empty one if
    there is no BOS, `ConfigError` for a prompt that does not fit `max_len`, for another model, and
    for a tokenizer and settings that do not fit.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> len(jf.complete(loaded, ["ab", "", "c"], max_new_tokens=3))
    3
    """
    completions = _complete(loaded, prompts, settings, changes, first_example_id, logits_processors)
    return unwrap_single(prompts, [completion.text for completion in completions])


@overload
def complete_with_details(  # type: ignore[overload-overlap]
    loaded: Loaded,
    prompts: str,
    *settings: _Setting,
    first_example_id: int = ...,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> Completion: ...
@overload
def complete_with_details(
    loaded: Loaded,
    prompts: Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = ...,
    logits_processors: Sequence[LogitsProcessor] = ...,
    **changes: Any,
) -> list[Completion]: ...
def complete_with_details(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = 0,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Any:
    """The continuation of each prompt, or of the one prompt, with its ids and log-probabilities.

    Arguments and errors are as in `complete`.

    >>> from jaxformer.text.tokenizers import train_characters
    >>> tokenizer = train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # all logits are 0
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> added = jf.complete_with_details(loaded, "ab", max_new_tokens=3)
    >>> round(float(jnp.exp(added.log_probs[0])), 3)  # each of the 10 tokens is as likely
    0.1
    """
    completions = _complete(loaded, prompts, settings, changes, first_example_id, logits_processors)
    return unwrap_single(prompts, completions)


def stream(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    *settings: _Setting,
    first_example_id: int = 0,
    logits_processors: Sequence[LogitsProcessor] = (),
    **changes: Any,
) -> Iterator[tuple[int, str]]:
    """Pairs of a prompt's index and a new piece of its continuation, as soon as it is written.

    The pieces of a prompt joined are the text that `complete` returns; no piece holds half a
    character. A piece is what up to 8 tokens add. Raises at once what `complete` raises.

    >>> tokenizer = jf.train_characters(["abcdef"])  # 10 ids with the special tokens
    >>> config = jf.TransformerConfig(10, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> loaded = jf.Loaded(model, params, tokenizer)
    >>> pieces = [""] * 2
    >>> for index, piece in jf.stream(loaded, ["ab", "c"], max_new_tokens=3):
    ...     pieces[index] += piece
    >>> pieces == jf.complete(loaded, ["ab", "c"], max_new_tokens=3)
    True
    """
    call, requests = _begin(loaded, prompts, settings, changes, first_example_id, logits_processors)
    return _pieces(call, requests)


def _pieces(call: "_Call", requests: list["_Request"]) -> Iterator[tuple[int, str]]:
    for updates_of_part in decode_parts(call.groups(requests), 1, STEADY):
        for updates in updates_of_part:
            for number, progress in updates:
                if progress.piece:
                    yield number, progress.piece


def _complete(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    settings: tuple[_Setting, ...],
    changes: dict[str, Any],
    first_example_id: int,
    logits_processors: Sequence[LogitsProcessor],
) -> list[Completion]:
    """The continuation of each prompt."""
    call, requests = _begin(loaded, prompts, settings, changes, first_example_id, logits_processors)
    pace = STEADY if call.options.stop else pace_of_whole_texts()
    by_number: dict[int, Completion] = {}
    for number, progress in decode_all(call.groups(requests), concurrency(call.params), pace):
        if progress.completion is not None:
            by_number[number] = progress.completion
    completions = [by_number[number] for number in range(len(requests))]
    if any(np.isnan(completion.log_probs).any() for completion in completions):
        warnings.warn("the model's logits are NaN: the texts mean nothing", stacklevel=3)
    return completions


def _begin(
    loaded: Loaded,
    prompts: str | Iterable[Prompt],
    settings: tuple[_Setting, ...],
    changes: dict[str, Any],
    first_example_id: int,
    logits_processors: Sequence[LogitsProcessor],
) -> tuple["_Call", list["_Request"]]:
    """The values of the call, and the texts to continue."""
    inputs, tokenizer, _ = check_inputs(loaded, prompts, DecoderOnly)
    config, options = loaded.choose_settings(settings, changes, SamplingConfig, CompletionOptions)
    named = changes.keys() | {field for x in settings for field in vars(x)}
    if "max_new_tokens" in named and "max_length" not in named:  # a folder's counts no more
        options = replace(options, max_length=None)
    model_config = loaded.model.config
    eos = options.eos
    if eos is None:
        eos = () if tokenizer.special.eos is None else (tokenizer.special.eos,)
    for token in eos:
        check_id("eos", token, model_config.vocab_size)
    requests = []
    encoded = prompt_ids(inputs, tokenizer)
    for i, ids in enumerate(encoded):
        name = f"prompt {i + 1} of {len(encoded)}"
        if not ids:
            if tokenizer.special.bos is None:
                raise DataError(
                    f"{name} is empty, and the vocabulary has no token to begin a text with: give "
                    "it some text"
                )
            ids = [tokenizer.special.bos]
        count = _count_new_tokens(name, len(ids), config, options, model_config.max_len)
        requests.append(_Request(ids, count, first_example_id + i))
    config = replace(config, suppress_tokens=suppressed_ids(model_config, tokenizer, config))
    model, params = prepare(loaded.model, loaded.params)
    processors = tuple(logits_processors)
    return _Call(model, params, tokenizer, config, options, eos, processors), requests


def _count_new_tokens(
    name: str, prompt_length: int, config: SamplingConfig, options: CompletionOptions, max_len: int
) -> int:
    """The most tokens that follow the prompt `name`; `ConfigError` where they do not fit."""
    count = min(config.max_new_tokens, (options.max_length or FOREVER) - prompt_length)
    if count < 1:
        raise ConfigError(
            f"{name} has {prompt_length} tokens, but max_length={options.max_length} of prompt and "
            "continuation: give max_new_tokens instead"
        )
    total = prompt_length + count
    if total > max_len and options.overflow == "refuse":
        raise ConfigError(
            f"{name} has {prompt_length} tokens, which makes {total} with max_new_tokens={count}, "
            f"but max_len={max_len}: shorten it, give a smaller max_new_tokens, or give "
            "overflow='slide'"
        )
    return count


class _Request(NamedTuple):
    """A prompt to continue."""

    prompt: list[int]
    """Its ids."""
    max_new_tokens: int
    """The most tokens that are added."""
    example_id: int
    """The number that its random numbers depend on."""

    @property
    def length(self) -> int:
        """The most tokens of the prompt and its continuation."""
        return len(self.prompt) + self.max_new_tokens


class _Progress(NamedTuple):
    """The text that a piece of decoding has added, and the continuation once it has ended."""

    piece: str
    completion: Completion | None


class _Call(NamedTuple):
    """The values that all texts of a call share."""

    model: DecoderOnly
    params: Any
    tokenizer: Tokenizer
    config: SamplingConfig
    options: CompletionOptions
    eos: tuple[int, ...]
    logits_processors: tuple[LogitsProcessor, ...]

    def groups(
        self, requests: Sequence[_Request]
    ) -> Iterator[tuple[list[tuple[int, _Request]], Callable[[int], "_PromptDecoder"]]]:
        """Numbered requests of each padded length, and a function that makes their decoder."""
        by_size: dict[int, list[tuple[int, _Request]]] = {}
        for number, request in enumerate(requests):
            by_size.setdefault(text_size(request.length), []).append((number, request))
        for size, group in sorted(by_size.items()):
            # Prompts that enter together are of similar length.
            group.sort(key=lambda numbered: len(numbered[1].prompt))
            yield group, partial(_PromptDecoder, self, [request for _, request in group], size)

    def start(self, request: _Request) -> PartialText:
        """The continuation of `request`, which is empty."""
        return PartialText(
            request.example_id,
            request.prompt,
            self.tokenizer,
            max_new_tokens=request.max_new_tokens,
            eos=self.eos,
            stop=self.options.stop,
        )

    def seen_and_new(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """How many tokens a text sees when it enters, and how many it may then get.

        A text that does not fit slides: it sees its last tokens, beside room for max_len // 2.
        """
        max_len = self.model.config.max_len
        if prompt_length + max_new_tokens <= max_len:
            return max_len, max_new_tokens
        half = max(1, max_len // 2)
        return max(1, max_len - half), half


class _PromptDecoder(RowDecoder[_Request, PartialText, _Progress]):
    """Continues `count` of the `requests`, each of at most `size` tokens."""

    def __init__(self, call: _Call, requests: Sequence[_Request], size: int, count: int) -> None:
        self.call = call
        self.size = size
        self.room = min(size, call.model.config.max_len)
        static: dict[str, Any] = {
            "config": replace(without_values(call.config), max_new_tokens=size),
            "eos": call.eos,
            "logits_processors": call.logits_processors,
            "cache_length": self.room,
        }

        def shape_of(params: Any, rows: int) -> SampleState:
            return begin_rows.eval_shape(call.model, params, rows, **static)

        super().__init__(call.model, call.params, count, BATCH_SIZE, shape_of, sample_more)
        self.reads_padding: bool = getattr(self.state.cache, "can_truncate", True)
        rows = np.zeros(self.entering, np.int32)
        new, _ = self._new_texts([call.start(requests[0])])
        # By the width, and whether other parts come before.
        self.parts: dict[tuple[int, bool], Callable[..., Any]] = {}
        for width, later in self._kinds_of_parts(requests):
            tokens = np.zeros((len(rows), width), np.int32)
            place = np.int32(0) if later else None
            read = self.compile(read_prompts, rows, new, tokens, place, **static)
            self.parts[width, later] = read

    def start(self, request: _Request) -> PartialText:
        """The continuation of `request`, which is empty."""
        return self.call.start(request)

    def count_together(self, texts: Sequence[PartialText]) -> int:
        """All of `texts`; without padding as many as have contexts of one length."""
        if self.reads_padding:
            return len(texts)
        lengths = [len(self._context(text)) for text in texts]
        same = itertools.takewhile(lambda length: length == lengths[0], lengths)
        return len(list(same))

    def enter(
        self, state: Any, rows: Int[np.ndarray, " K"], texts: Sequence[PartialText]
    ) -> Iterator[SampleState]:
        """Reads the contexts of the texts, part by part."""
        new, tokens = self._new_texts(texts)
        tokens = np.pad(tokens, ((0, 0), (0, max(0, self.room - tokens.shape[1]))))
        for start, width in self._plan(int(new.context.max())):
            part = tokens[:, start : start + width]
            place = np.int32(start) if start else None
            state = self.parts[width, start > 0](state, rows, new, part, place)
            yield state

    def results(self, state: SampleState) -> Any:
        """The numbers of tokens, the tokens and their log-probabilities."""
        return (
            state.prompt_lengths,
            state.starts,
            state.lengths,
            state.history,
            state.log_probs,
        )

    def take(self, text: PartialText, row: Any, stopped: bool) -> _Progress:
        """Adds the new tokens to `text`."""
        prompt_length, start, length, history, log_probs = row
        piece = ""
        for place in range(prompt_length + len(text.ids), length):
            if not text.done:
                text.log_probs.append(float(log_probs[place - start]))
                piece += text.add(int(history[place]))
        if not text.done:
            return _Progress(piece, None)
        return _Progress(piece, Completion(text.text, text.ids, text.log_probs, text.ended))

    def _plan(self, count: int) -> list[tuple[int, int]]:
        """(start, width) of the parts in which contexts of up to `count` tokens are read."""
        if self.reads_padding:
            return reading_plan(count, self.room, self.entering)
        return exact_reading_plan(count, self.entering)

    def _kinds_of_parts(self, requests: Sequence[_Request]) -> list[tuple[int, bool]]:
        """The widths of the parts that are read, each with whether others come before."""
        max_len = self.call.model.config.max_len
        most_seen = []
        for request in requests:
            seen, _ = self.call.seen_and_new(len(request.prompt), request.max_new_tokens)
            most_seen.append(seen)
        counts = {
            min(len(request.prompt), seen)
            for request, seen in zip(requests, most_seen, strict=True)
        }
        of_sliding = [seen for seen in most_seen if seen < max_len]
        if of_sliding:  # they enter again, with other numbers of tokens
            counts = {*range(min(counts), max(of_sliding) + 1)}
        plans = [self._plan(count - 1) for count in counts]
        return sorted({(width, start > 0) for plan in plans for start, width in plan})

    def _context(self, text: PartialText) -> list[int]:
        """The tokens that `text` sees when it enters."""
        seen, _ = self.call.seen_and_new(len(text.prompt), text.max_new_tokens)
        return text.context(seen)

    def _new_texts(self, texts: Sequence[PartialText]) -> tuple[NewTexts, Int[np.ndarray, "K T"]]:
        """`texts` that enter, and the tokens before the last one that each of them sees."""
        call = self.call
        count = self.entering
        texts = [*texts, *[texts[0]] * (count - len(texts))]
        contexts = [self._context(text) for text in texts]
        wholes = [text.prompt + text.ids for text in texts]
        limits = []
        for text in texts:
            _, new = call.seen_and_new(len(text.prompt), text.max_new_tokens)
            limits.append(len(text.ids) + min(text.left, new))

        def column(values: Iterable[int]) -> Int[np.ndarray, " K"]:
            return np.array([*values], np.int32)

        prompts = SamplerInputs(
            last_tokens=column(ids[-1] for ids in contexts),
            max_new_tokens=column(limits),
            example_ids=column(text.example_id for text in texts),
            history=pad_right(wholes, count, self.size),
            history_lengths=column(map(len, wholes)),
            written=column(len(text.ids) for text in texts),
        )
        values = row_values(call.config, count)
        context = column(map(len, contexts)) - 1
        missing = call.options.min_length - column(len(text.prompt) for text in texts)
        values["min_new_tokens"] = np.maximum(values["min_new_tokens"], missing)
        new_texts = NewTexts(prompts, context, values, np.uint32(call.options.seed))
        return new_texts, pad_right([ids[:-1] for ids in contexts], count, int(context.max()))
